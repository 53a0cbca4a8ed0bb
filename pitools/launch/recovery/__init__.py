"""Why an attempt ended, and what follows from that: evidence, causes, policy, exclusions."""
