"""Coordination: how the ranks of a save agree."""
