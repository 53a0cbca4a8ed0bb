"""Judge the facts of a node by checks that are data."""
