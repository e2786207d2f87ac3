"""Links move bytes between two ranks: shared memory, NCCL, pinned host memory."""
