"""The machine's side of Baton's processes: signals, logs, ports, file descriptors, memory, folders."""
