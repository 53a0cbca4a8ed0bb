"""What can go wrong, with the exit codes of the rest of the tools."""

from __future__ import annotations


class ClusterProblem(Exception):
    """The machine or the clusters refused: what, where, and what to do next."""

    exit_code = 4

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class UsageProblem(ClusterProblem):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class FileProblem(ClusterProblem):
    """A file a human wrote is wrong."""

    exit_code = 3


class BusyProblem(ClusterProblem):
    """Nothing is wrong with the request; try again later."""

    exit_code = 75
