"""Stage Zarr stores without a manifest."""
