"""Routes that other servers' clients ask: TorchServe's, and those that packages answer.

Must not decide anything that our own routes could decide otherwise; what a request means is app.ingress's business.
"""
