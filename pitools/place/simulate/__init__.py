"""Replay of a trace of jobs on several sites, through the same decisions as live."""
