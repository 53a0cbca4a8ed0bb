"""Node health: gather facts, judge them by checks that are data, drain and return nodes, and benchmark them."""
