"""The paged KV cache: which block belongs to whom (pure), and the tensors that hold it."""
