"""Tensor parallelism: the collectives of a worker's ranks, and how rank 0 leads the others."""
