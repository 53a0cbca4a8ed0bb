"""Show a fabric with its occupancy, as text, pictures and records."""
