"""A gateway's measurements of the last hour."""
