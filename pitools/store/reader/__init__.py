"""Reader: steps of a version, read from its files."""
