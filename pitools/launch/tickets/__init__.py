"""Tickets: jobs of one name, submitted once, for `pit place`."""
