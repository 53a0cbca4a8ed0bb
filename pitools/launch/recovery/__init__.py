"""Recovery: what follows from the end of an attempt, decided and done."""
