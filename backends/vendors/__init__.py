"""Vendors: one row of facts each, and one small file for what a row cannot say. Must not know networks."""
