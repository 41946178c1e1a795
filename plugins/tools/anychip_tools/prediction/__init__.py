"""Parts of `anychip predict`: finding images, answers here or by a service, and the files of answers.

Must not know the command's options.
"""
