"""What a chip is to the rest of anychip: the contract, its data types and its errors.

Must not know a vendor.
"""
