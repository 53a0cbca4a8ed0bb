"""Where a request could run, when, for how long, and at what price."""
