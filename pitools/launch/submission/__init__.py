"""Create a run's folder and submit its jobs."""
