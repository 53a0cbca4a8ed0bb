"""The data mover: dataset versions onto a node's own disk, verified on the way, whole or absent."""
