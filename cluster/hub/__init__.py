"""Models of the Hugging Face hub: resolved by name, downloaded, listed and removed."""
