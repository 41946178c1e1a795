"""Interfaces of other servers, and networks of timm and transformers. Each is found through an entry point."""
