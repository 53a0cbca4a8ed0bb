"""Submission: a run's folder and its jobs."""
