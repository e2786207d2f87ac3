"""A deployment as one frozen value, from a TOML file and flags."""
