"""Where a device's answers begin to differ from float32 on the CPU: whole networks, layers, and cuts of them.

Must not know requests or processes, nor decide what serves: that is the precision gate's.
"""
