"""Move a run to another site, and continue it there."""
