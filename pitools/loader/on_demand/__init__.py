"""Fetch shards of a version in an object store into a node's cache at their first read."""
