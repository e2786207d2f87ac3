"""What each of Baton's processes needs of its machine: signals, logs, ports, file descriptors, memory, folders."""
