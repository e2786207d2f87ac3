"""What each of our processes needs of its machine: signals, logs, ports, descriptors, memory, folders."""
