"""The forms in which traces of jobs are published, one module each: `rows(text)` and `row(raw)`."""
