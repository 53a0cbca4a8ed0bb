"""Provenance: what a run is made from, recorded before it is submitted."""
