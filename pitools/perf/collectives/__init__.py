"""Measure collectives between the nodes of a job, and say whether they are as fast as they were."""
