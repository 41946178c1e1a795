"""Search for the place where a device's answers begin to differ from float32 on the CPU: networks, layers, cuts.

Must not decide what serves: that is the precision gate's task.
"""
