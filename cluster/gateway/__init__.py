"""Gateway processes: one with its faces, or several behind one port and the process that supervises them."""
