"""The staging root of a node: its layout, locks, leases, records, space, eviction and lists."""
