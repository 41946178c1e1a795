"""Interfaces of other servers: routes of DeepStack and X-AnyLabeling, Triton's metrics; and networks of
timm and transformers.

Each is found through an entry point: of the group `anychip.clients`, with a router and the needs of its routes, or of
`anychip.libraries`. Must not be imported by anychip, nor decide anything that its own routes decide.
"""
