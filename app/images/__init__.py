"""From bytes to pixels: headers, decoding, and the threads that do it.

Must not know requests or networks.
"""
