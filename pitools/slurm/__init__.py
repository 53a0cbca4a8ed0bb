"""Run Slurm's commands, and parse their output into records."""
