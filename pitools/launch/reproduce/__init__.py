"""Repeat a run from its recorded code, environment, data and site, and compare runs."""
