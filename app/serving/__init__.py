"""Request flow from body to answer, and the models that are served. Must not know a transport, nor workers' life."""
