"""Commands beside the service: doctor, top, prediction without a server.

Must not be imported by the service.
"""
