"""Dense families whose layers are of two kinds: with a window, and without."""
