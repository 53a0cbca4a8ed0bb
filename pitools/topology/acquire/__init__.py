"""Acquire the best free nodes for a job from a live Slurm."""
