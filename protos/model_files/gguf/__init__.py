"""GGUF, the model format of llama.cpp: one mapped file with weights and metadata, from which the small files of a
Hugging Face folder are made. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
