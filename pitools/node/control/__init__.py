"""Drain nodes that checks found faulty, and return them after a re-test; every act is an entry of a journal."""
