"""The one form of quantised weights in memory, below the kernels that multiply with it."""
