"""Benchmark: what bounds a loader."""
