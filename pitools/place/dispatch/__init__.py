"""The queue over all sites: a folder, and the tick that works on it."""
