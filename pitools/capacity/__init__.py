"""Capacity planning: the workload of a cluster, what-ifs on the simulator of place, and their back-test."""
