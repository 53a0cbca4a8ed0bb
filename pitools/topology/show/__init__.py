"""A fabric and who is on it, for eyes and for pipes."""
