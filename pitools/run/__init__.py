"""Tier 1: read and write the files of a run folder."""
