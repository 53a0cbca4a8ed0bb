"""Run one rank of a job: rendezvous, environment, the user's program, and the record of a failure."""
