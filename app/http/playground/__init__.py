"""The page at `GET /`: drop an image on the service and see what is in it.

Owns: the page's files, its Content-Security-Policy, and the sample images it offers. Must not know how images
become predictions: the page asks the same routes as every other client, and loads nothing from another host.
"""

from app.http.playground.page import mount_playground

__all__ = ["mount_playground"]
