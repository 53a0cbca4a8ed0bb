"""Probes: collect stacks, out-of-memory kills and unreachable nodes of a job."""
