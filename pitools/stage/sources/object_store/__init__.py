"""Sources in object stores, by `obstore`."""
