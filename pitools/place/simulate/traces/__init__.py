"""Formats of published job traces. Each module has `rows(text)` and `row(raw)`."""
