"""Recovery: decide what follows an attempt, and do it."""
