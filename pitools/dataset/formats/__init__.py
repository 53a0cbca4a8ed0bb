"""Recordings as they come: what a file holds, by layout, and its steps."""
