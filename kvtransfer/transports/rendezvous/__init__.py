"""Where ranks find each other."""
