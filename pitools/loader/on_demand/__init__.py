"""Shards of a version in an object store, brought to a node's cache when they are first read."""
