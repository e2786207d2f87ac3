"""The layers of the decoder stack, each sharded over tensor-parallel ranks where it has weights to shard."""
