"""Choose a job's site by its wait, data, run time, cost and risk."""
