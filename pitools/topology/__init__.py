"""Tier 2: which rank sits where."""
