"""The parts of `scripts/devcluster`: standard library only, because it runs before any environment is built."""
