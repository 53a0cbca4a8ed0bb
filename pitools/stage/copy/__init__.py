"""The copy engine: forked workers that read, hash and write once, a journal of what is done, links to what is there."""
