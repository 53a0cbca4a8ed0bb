"""Monitoring: the state, the logs and the progress of runs."""
