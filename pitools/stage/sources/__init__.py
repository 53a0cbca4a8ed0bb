"""Sources: where a dataset's bytes are read from."""
