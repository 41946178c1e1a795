"""Base of `app`, `models` and `backends`: the command's first lines, and its Python children.

Its name is unique: a user's project may well have a package `app` or `models` of its own.
"""
