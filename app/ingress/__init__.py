"""Ingress of one request, over any transport: its context, its budget, its deadline, and the order of the steps.

Must not know how bytes look on a connection.
"""
