"""Routes that other servers' clients ask: DeepStack's, TorchServe's, X-AnyLabeling's.

Must not decide anything that our own routes could decide otherwise; what a request means is app.ingress's business.
"""
