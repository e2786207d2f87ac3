"""One module for each way to quantise: what its config says, as a value, and what of it is not served. Pure."""
