"""Tier 1: site files, and the commands and scripts that follow from them."""
