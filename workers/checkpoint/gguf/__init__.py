"""Weights in GGUF files: tensors by Hugging Face's names, and the block formats of llama.cpp."""
