"""How long a step takes: rooflines, measured kernels, fitted steps."""
