"""The small files of a model (config, tokenizer, chat template), read alike by gateways and workers, from a Hugging
Face folder or from the metadata of a GGUF file."""
