"""Tier 4: which of several sites, when, and at what cost."""
