"""Keep the dataset versions of a policy on a node, from cron."""
