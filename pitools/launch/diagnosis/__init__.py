"""Diagnosis: why an attempt ended. Reads files, returns a Cause, never queries Slurm."""
