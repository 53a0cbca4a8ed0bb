"""Tier 1: what a site file says."""
