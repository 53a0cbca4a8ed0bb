"""Tier 3: a request becomes a plan, a plan becomes a run."""
