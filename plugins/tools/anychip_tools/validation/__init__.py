"""Search for where a device's answers begin to differ from float32's. Must not decide what serves."""
