"""Which samples come when, and what of the dataset each one is: windows, mixtures, packs and buckets."""
