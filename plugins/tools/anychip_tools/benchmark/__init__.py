"""Measurements of a network on a device, and of a service over HTTP.

Must not know how results are shown, nor import the service: it may be another one, on another machine.
"""
