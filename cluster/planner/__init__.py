"""How many workers of each role there should be: from what clients saw, by a pure function."""
