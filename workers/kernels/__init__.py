"""One kernel a file, each with its reference twin."""
