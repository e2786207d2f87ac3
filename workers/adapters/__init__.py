"""LoRA adapters: their files, and what they add to the products of linear layers (docs/adr/0059)."""
