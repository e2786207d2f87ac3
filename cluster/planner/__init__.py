"""How many workers of each role there should be."""
