"""What jobs used: `sacct` into a store, and reports of it."""
