"""The network fabric: node selection and rank order."""
