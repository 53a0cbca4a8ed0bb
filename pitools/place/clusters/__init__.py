"""What several sites are now, and what became of what they foretold."""
