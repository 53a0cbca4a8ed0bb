"""Small reference training loops, one in JAX and one in PyTorch. Copy one as your start."""
