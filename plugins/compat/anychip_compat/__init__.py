"""Routes that other servers' clients ask: DeepStack's and X-AnyLabeling's.

Each is found through an entry point of the group `anychip.clients` and has a router, and what its routes need. Must
not be imported by anychip, nor decide anything that its own routes decide.
"""
