"""Site files, and the commands and scripts that follow from them."""
