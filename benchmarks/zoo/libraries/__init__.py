"""Writers of each library's files, with the library's answers; only processes that build import them."""
