"""Programs that other engines' own environments run."""
