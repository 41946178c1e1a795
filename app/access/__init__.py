"""Access: keys, roles, the administration's own bind, fair shares, the audit.

Both transports call this package, so that one rule holds for HTTP and gRPC. It must not know frameworks, models, or how
a request is answered.
"""
