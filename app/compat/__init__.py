"""Routes for clients of other servers: TorchServe and those of packages. Must not decide what our own routes could."""
