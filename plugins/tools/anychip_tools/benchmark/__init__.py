"""Measurements of a network on a device, and of any service over HTTP. Must not import the service."""
