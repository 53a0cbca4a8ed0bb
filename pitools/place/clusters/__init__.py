"""Snapshots of sites, and the records of past waits, transfers and failures."""
