"""`pit monitor report`: a day, or a run, as one HTML file."""
