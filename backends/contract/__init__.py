"""Contract between chips and the rest of anychip. Must not know a vendor."""
