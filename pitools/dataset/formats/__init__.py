"""Scan and read recordings of every supported layout."""
