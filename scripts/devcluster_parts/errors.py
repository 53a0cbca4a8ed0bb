"""Errors of `scripts/devcluster`, with the exit codes of pitools."""

from __future__ import annotations


class ClusterProblem(Exception):
    """The machine or the clusters refused. what: the problem. where: its object. hint: what to do next."""

    exit_code = 4

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class UsageProblem(ClusterProblem):
    """The command line is wrong."""

    exit_code = 2


class FileProblem(ClusterProblem):
    """A file that a person wrote is wrong."""

    exit_code = 3


class BusyProblem(ClusterProblem):
    """Nothing is wrong with the request; try again later."""

    exit_code = 75
