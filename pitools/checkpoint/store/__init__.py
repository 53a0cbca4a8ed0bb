"""Store: a folder of checkpoints on disk."""
