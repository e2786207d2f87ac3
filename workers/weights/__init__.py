"""A checkpoint's weights: tensors by name, and the formats of linear weights."""
