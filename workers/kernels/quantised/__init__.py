"""Products with quantised weights in Triton: packed once, multiplied from codes in registers."""
