"""What a network is to the rest of anychip: the contract, its data types and its errors.

Must not know an architecture.
"""
