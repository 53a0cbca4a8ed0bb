"""Tier 0: errors, records, output, hosts, units, files, processes. Imports nothing of ours."""
