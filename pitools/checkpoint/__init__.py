"""Tier 2: checkpoints that are whole, verified and found again, whoever wrote their tensors."""
