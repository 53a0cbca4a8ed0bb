"""Adapters: how each framework writes and reads a checkpoint's files."""
