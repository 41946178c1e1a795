"""Commands beside the service: doctor, prediction without a server.

Must not be imported by the service.
"""
