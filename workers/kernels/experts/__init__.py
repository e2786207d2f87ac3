"""A mixture of experts in Triton."""
