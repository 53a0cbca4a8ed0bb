"""Who may have what: a policy file ↔ the accounts, users, QOS and limits of Slurm's accounting."""
