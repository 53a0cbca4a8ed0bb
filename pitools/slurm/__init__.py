"""Tier 1: what Slurm says, as records; and how to ask it."""
