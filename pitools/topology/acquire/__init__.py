"""The best free nodes, got from a live Slurm."""
