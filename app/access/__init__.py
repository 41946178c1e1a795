"""Access: keys, roles, fair shares, the audit, for HTTP and gRPC alike. Must not know frameworks or models."""
