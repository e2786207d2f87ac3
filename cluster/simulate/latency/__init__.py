"""Models of the time of a step: rooflines, measured kernels, fitted steps."""
