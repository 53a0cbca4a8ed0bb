"""Export what the sites' controllers and runs say as metrics for Prometheus: one table, collectors, HTTP and files."""
