"""Tier 4: choose a job's site by its wait, data, run time, cost and risk."""
