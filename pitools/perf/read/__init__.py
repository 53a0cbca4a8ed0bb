"""Readers of profiles and logs into the span table."""
