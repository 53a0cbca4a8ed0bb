"""What is known of the versions in a root: which there are, what names them, what may go."""
