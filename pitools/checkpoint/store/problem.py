"""One thing that is wrong with a checkpoint."""

from __future__ import annotations

from typing import Literal

from pitools.checkpoint.store import layout
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
        """Whether the checkpoint must not be restored; a stray file beside the payload, such as a note, is harmless."""
        return self.problem != "extra" or self.path.startswith(f"{layout.PAYLOAD}/")

    def text(self) -> str:
        """One line for people."""
        return f"{self.path or self.checkpoint}: {self.problem}: {self.got}, expected {self.expected}"
