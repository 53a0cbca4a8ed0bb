"""What a dataset holds on disk: a Zarr v3 store and the manifest that says what its bytes are."""
