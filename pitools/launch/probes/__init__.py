"""Probes: what is read on the nodes of a job, or about them."""
