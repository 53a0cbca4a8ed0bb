"""The files that describe a fabric, one module a form."""
