"""What lies in a checkpoint's folder: fields of JSON files, tensors by name, and the encodings of linear weights."""
