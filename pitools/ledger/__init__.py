"""Account the allocated time of runs: each resource-second is in exactly one state."""
