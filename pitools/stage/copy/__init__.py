"""The copy engine: forked workers that read, hash and write once, a journal to resume from, hard links."""
