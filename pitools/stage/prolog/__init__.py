"""What `scripts/pit-prolog` runs: leases and checks."""
