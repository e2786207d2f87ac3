"""tokenizer.json, made from the other files that a model's tokenizer may be published in."""
