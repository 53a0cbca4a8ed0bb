"""`python -m pitools` is `pit`, for places where only an interpreter is known."""

from pitools.cli import main

main()
