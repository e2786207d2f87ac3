"""What became of recent requests, for the admin API."""
