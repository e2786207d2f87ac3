"""Gateway processes behind one port, and what they tell each other."""
