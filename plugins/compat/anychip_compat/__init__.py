"""What other servers' clients ask: DeepStack's and X-AnyLabeling's routes, Triton's metrics; OpenVINO's files; and
networks of timm and transformers.

Each is found through an entry point: of the group `anychip.clients`, with a router, and what its routes need, of
`anychip.graphs`, or of `anychip.libraries`. Must not be imported by anychip, nor decide anything that its own routes
decide.
"""
