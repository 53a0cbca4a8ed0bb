"""What a run was made from, so that it can be made again: code, environment, data, site."""
