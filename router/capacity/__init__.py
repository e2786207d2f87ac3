"""A gateway's part in capacity: it reports what its clients saw."""
