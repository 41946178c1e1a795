"""`anychip verify`: one run that checks and measures a device and its software, without a network connection.

Every part runs in a child process, so that a driver that hangs or crashes costs only that part. Must not write a host's
name, serial numbers or paths: reports are made to be published.
"""
