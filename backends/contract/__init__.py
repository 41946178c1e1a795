"""Contract between chips and the rest of anychip: its data types and its errors.

Must not know a vendor.
"""
