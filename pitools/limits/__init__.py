"""What Slurm's limits allow a job: pure rules, checked against the real slurmctld, and a reader of a site's limits."""
