"""Save and restore verified checkpoints, with Orbax, DCP or any other writer of files."""
