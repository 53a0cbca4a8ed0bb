"""Tier 3: the small reference training loops, one in JAX and one in PyTorch. Copy one as your start."""
