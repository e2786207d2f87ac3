"""`baton quantize`."""
