"""The precision gate and the images it asks: an executable may serve only after its answers agree with float32.

Must not know requests or processes.
"""
