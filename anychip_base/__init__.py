"""What lies below `app`, `models` and `backends`: the command's first lines, its Python children.

Its name is nobody else's: a user's project may well have a package `app` or `models` of its own.
"""
