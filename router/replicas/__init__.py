"""Gateway processes behind one port, and their messages to each other."""
