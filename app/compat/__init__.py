"""Routes for other servers' clients: TorchServe's, and those that packages answer.

Must not decide anything that our own routes could decide otherwise; app.ingress owns the meaning of a request.
"""
