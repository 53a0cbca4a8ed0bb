"""Tier 2: recordings in, verified Zarr datasets out."""
