"""Estimate where a request could run, its start, its run time and its cost."""
