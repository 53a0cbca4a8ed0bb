"""The parts of each step's time, what limits a run, and pictures of both."""
