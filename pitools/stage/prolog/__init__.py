"""Leases and checks of `scripts/pit-prolog`."""
