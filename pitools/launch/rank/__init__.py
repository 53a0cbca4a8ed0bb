"""Rank: what runs as every rank of a job."""
