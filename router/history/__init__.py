"""What a gateway measured over the last hour."""
