"""The paged KV cache: ownership of blocks (pure), and the tensors that hold them."""
