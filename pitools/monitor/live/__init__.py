"""`pit monitor watch`: sites, queues, runs and alerts on one screen of a terminal."""
