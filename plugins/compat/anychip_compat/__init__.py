"""What other servers' clients ask: DeepStack's and X-AnyLabeling's routes, Triton's metrics; and OpenVINO's files.

Each is found through an entry point: of the group `anychip.clients`, with a router, and what its routes need, or of
`anychip.graphs`. Must not be imported by anychip, nor decide anything that its own routes decide.
"""
