"""Fan-out: the nodes of a job step read a dataset once from its source and pass it on to one another."""
