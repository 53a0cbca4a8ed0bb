"""Errors, records, output, hosts, units, files, processes. Imports no other folder of pitools."""
