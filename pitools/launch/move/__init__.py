"""Move: continue a run at another site."""
