"""What `anychip predict` is made of: images that are found, answers here or by a service, and the files written of it.

Must not know the command's options.
"""
