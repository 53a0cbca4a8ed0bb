"""Count the operations that a model's training step needs, and relate its speed to what the device can."""
