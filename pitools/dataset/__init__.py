"""Recordings in, verified Zarr datasets out."""
