"""Decoder models: families are specs over one stack, loaded from Hugging Face checkpoint folders."""
