"""Zarr v2 and v3 as they are on disk."""
