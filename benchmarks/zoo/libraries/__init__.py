"""How files of each library are written, and what the library answers: imported in processes that build."""
