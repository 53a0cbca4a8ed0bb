"""Recordings into shards: grids, workers, and the files they write."""
