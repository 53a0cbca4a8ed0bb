"""Read the facts of a node."""
