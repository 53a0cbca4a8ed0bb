"""Benchmark nodes alone and in groups, and compare them with their own past and with their peers."""
