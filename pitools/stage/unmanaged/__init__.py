"""Zarr stores without a manifest of ours."""
