"""Kernels, one per file, each with its reference twin."""
