"""Analyse where the time of training steps goes, and how it changes."""
