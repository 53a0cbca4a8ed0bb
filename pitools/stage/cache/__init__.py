"""What lies on a node: the root, its locks and leases, records of use, space, eviction, lists."""
