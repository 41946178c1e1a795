"""Contract of a network with the rest of anychip, its data types and its errors. Must not know an architecture."""
