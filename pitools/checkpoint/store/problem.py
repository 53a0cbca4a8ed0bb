"""One thing that is wrong with a checkpoint."""

from __future__ import annotations

from typing import Literal

from pitools.core.record import Record

ProblemKind = Literal["missing", "extra", "size", "digest", "unreadable", "manifest", "owner"]


class CheckpointProblem(Record, frozen=True, kw_only=True, tag="pit.checkpoint-problem/1"):
    """A file that differs from the manifest, or an invalid manifest.

    path: relative to the checkpoint's folder; "" for the folder itself.
    """

    checkpoint: str
    path: str
    problem: ProblemKind
    expected: str
    got: str

    @property
    def is_damage(self) -> bool:
        """Whether the saved bytes are not as they were: a stray file, or another run's checkpoint, is not damaged."""
        return self.problem not in ("extra", "owner")

    def text(self) -> str:
        """One line for people."""
        return f"{self.path or self.checkpoint}: {self.problem}: {self.got}, expected {self.expected}"
