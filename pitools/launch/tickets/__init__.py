"""Tickets: the jobs of `pit place`, each submitted exactly once under a unique name."""
