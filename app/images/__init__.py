"""Images: headers, decoding to pixels, parts, and files passed to a device.

Must not know requests or networks.
"""
