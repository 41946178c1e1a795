"""Images: headers, decoding to pixels, parts, and files for a device. Must not know requests or networks."""
