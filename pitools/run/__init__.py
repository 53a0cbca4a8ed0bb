"""Tier 1: what a run folder holds."""
