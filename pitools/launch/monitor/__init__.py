"""Monitoring: what a run is now, for people."""
