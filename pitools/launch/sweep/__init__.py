"""Run one request at many points: a grid of values, or a file of points. A sweep is a folder of runs."""
