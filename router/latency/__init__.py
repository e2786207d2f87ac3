"""What workers will take, learned from what they took."""
