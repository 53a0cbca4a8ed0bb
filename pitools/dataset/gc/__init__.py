"""Garbage collection: remove retired versions that nothing names."""
