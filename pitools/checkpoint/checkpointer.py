"""The one class that a training loop uses: saves in the background, restores what is verified.

    with Guard(folder, Orbax(), rank=…, world_size=…, put=…, get=…) as guard:
        if found := guard.restore(state):
            step, state, loader = found.step, found.state, found.loader
        …
        guard.save(step, state, loader)         blocks for a copy to this host's memory

The rest of a save happens in a thread, and there the ranks meet over a key-value store and never in a collective, which
the training's own would come between:

    all ranks write ─▶ meet ─▶ rank 0 finishes ─▶ all digest, durable ─▶ meet ─▶ rank 0 seals and shows ─▶ meet
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pitools.checkpoint import restore, tier_copy
from pitools.checkpoint.adapters.base import Adapter as Adapter
from pitools.checkpoint.adapters.base import Digests, as_ours
from pitools.checkpoint.coordination.barrier import Delete, Get, Put
from pitools.checkpoint.coordination.exchange import Meeting, introduce, together
from pitools.checkpoint.local_tier import Near, SaveTarget, folder_near
from pitools.checkpoint.store import layout, locks, owner, publish, retention, rng_state, state_schema
from pitools.core.errors import ClusterError, ConfigError, NoSpace, Unreachable
from pitools.core.fs import os_error
from pitools.core.record import decode_json

# How long a loop that failed waits for a save that is still being made: its peers may have died with it.
_LAST_S = 5.0
# How often the ranks meet in one save, at the most.
_MEETINGS = 5


class Restored(NamedTuple):
    """A checkpoint to go on from. step: steps made. loader, extra: as they were saved."""

    step: int
    state: Any
    loader: dict[str, Any]
    extra: dict[str, Any]


class _Staged(NamedTuple):
    """All that a save needs of the loop, which goes on. payload: in `place`, once it is there."""

    place: Path
    payload: Future[Path]
    write: Callable[[Meeting], Digests | None]
    table: dict[str, str]
    randomness: rng_state.States
    kept: dict[str, Any]


class Guard:
    """The checkpoints of one run, for one rank. All ranks make the same calls in the same order.

    A context manager: its end waits for the last save, and an error in the block does not, for long.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Adapter,
        *,
        rank: int = 0,
        world_size: int = 1,
        put: Put | None = None,
        get: Get | None = None,
        run: str = "",
        keep_last: int = retention.KEEP_LAST,
        keep_every: int = 0,
        stage: Path | None = None,
        timeout_s: float = 600.0,
        name: str = "checkpoint",
        delete: Delete | None = None,
    ) -> None:
        """put, get: of a store that all ranks share, not needed for one rank. delete: of a key there; without it rank
        0's memory grows by some keys a rank with every save. run: whose checkpoints these are.
        keep_last, keep_every: what stays, see `retain.prune`. timeout_s: how long the first rank waits for the last.
        stage: a folder on this node's own disk, to save in first; what is there is copied to `folder` in the
        background. On several nodes, and while that disk is full, saves go to `folder` at once. name: of this guard,
        where one store serves more than one. Raises Unreachable.
        """
        # Absolute: orbax refuses any other, and a loop may change its working directory.
        self.folder, self._adapter, self._run = Path(folder).absolute(), adapter, run
        self._keep, self._timeout_s = (keep_last, keep_every), timeout_s
        lead, store = rank == 0, (put, get, delete)
        self._barrier, self._token, nodes = introduce(*store, rank, world_size, name=name, timeout_s=timeout_s)
        self._local = folder_near(stage, self.folder, run, nodes, lead=lead)
        self._near = Near(self._local, self.folder, keep_last, keep_every) if self._local and lead else None
        self._model, self._saved = "", -1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saves = self._opens = self._restores = 0
        self._place, self._ended = None, False  # type: Path | None, bool
        self._held = contextlib.ExitStack()

    def restore(self, like: Any) -> Restored | None:
        """The newest checkpoint whose every byte is as it was saved, in the structure of `like`; None where there is
        none. Bad ones that are newer are moved to `quarantine`. The generators are set to where they were.

        Waits for an unfinished save. Raises what was wrong with that, ConfigError naming the first difference where the
        checkpoints are of another model.
        """
        self._open(like)
        self._restores += 1
        name = f"{self._token}-r{self._restores}"
        if self._saves:
            with together(self._barrier, f"{name}/saved"):
                self.wait()
        look = restore.Look(self._barrier, self.folder, self._local, name, self._writer)
        with look.newest() as found:
            if found is None:
                return None
            manifest, path = found
            with together(self._barrier, f"loading step {manifest.step}, {name}"):
                if manifest.format != self._adapter.format:
                    hint = "resume with the framework that wrote it, or give another checkpoint folder"
                    raise ConfigError(
                        f'written by "{manifest.format}", not "{self._adapter.format}"', where=str(path), hint=hint
                    )
                state = self._adapter.load(layout.payload(path), like)
                rng_state.restore(path, self._barrier.rank, self._adapter)
        if self._near:
            self._near.start()
        self._saved = manifest.step
        return Restored(manifest.step, state, manifest.loader, manifest.extra)

    def save(self, step: int, state: Any, loader: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Begin to save what training is after `step` steps; on return `state` may change.

        loader, extra: JSON, or records; rank 0's are kept. Waits for the save before this one. Raises what was wrong
        with that one, ConfigError.
        """
        failed = self._settle()
        if step == self._saved:
            return
        self._open(state)
        if self._saves and self._saved < 0 and self._place and self._barrier.rank == 0:
            layout.discard(self._place)  # of what failed: a full disk does not become free by itself
        self._saves += 1
        # A number: the same step may be saved again after it failed.
        token = f"{self._token}-{self._saves}"
        place = self._place = layout.building(self._choose(failed, token), step, token)
        kept = {"loader": msgspec.to_builtins(loader) or {}, "extra": msgspec.to_builtins(dict(extra or {}))}
        meet = Meeting(self._barrier, f"{token}/save of step {step}", place / layout.SHARES)
        payload: Future[Path] = Future()
        try:
            table, randomness = self._adapter.describe(state), rng_state.taken(self._adapter)
            write = self._adapter.stage(state, payload)
        except BaseException as error:
            self._saved = -1
            payload.set_exception(error)
            _in_background(meet.fail, error).join(_LAST_S)
            raise
        self._saved = step
        staged = _Staged(place, payload, write, table, randomness, kept)
        self._thread = _in_background(self._finish, step, meet, staged)

    def wait(self) -> None:
        """Return when all that was saved is safe at every rank. Raises what was wrong with it."""
        if error := self._settle():
            raise error

    def poll(self) -> None:
        """Raise what was wrong with the last save, as soon as that is known: the next save is an interval later."""
        if self._error and not self._local:  # of a local one the next save knows a way out
            self.wait()

    def _settle(self) -> BaseException | None:
        """What was wrong with the last save, once it has ended."""
        if self._thread:
            # The barriers have time-outs; this one is for a file system that holds this rank's own write.
            limit_s = (self._timeout_s + 30.0) * _MEETINGS
            self._thread.join(limit_s)
            if self._thread.is_alive():
                what = f"a save of step {self._saved} did not end in {limit_s:g} s: its write does not come back"
                raise Unreachable(what, where=str(self.folder), hint="is the file system there?")
            self._thread = None
        error, self._error = self._error, None
        if error:
            self._saved = -1
        return error

    def _choose(self, failed: BaseException | None, token: str) -> Path:
        """The folder of the next save, the same at all ranks. Raises what was wrong with the last one."""
        target = self._near.takes_next(failed) if self._near else SaveTarget()
        if self._local:
            told = self._barrier.tell(f"{token}/where", msgspec.json.encode(target).decode())
            target = decode_json(told, SaveTarget)
        if failed and not target.replaces_failed:
            raise failed
        return self._local if self._local and target.tier == "local" else self.folder

    def close(self) -> None:
        """Wait for the last save, and until it stands in the shared folder; then leave the folder to others."""
        if self._ended:
            return
        self._ended = True
        try:
            with together(self._barrier, f"{self._token}/end"):
                self.wait()
                if self._near:
                    self._near.wait(self._timeout_s)
        finally:
            self._leave()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        if self._thread:
            self._thread.join(self._timeout_s if self._barrier.world_size == 1 else _LAST_S)
        if self._error and self._error is not error:
            error.add_note(f"before that, in the background: {type(self._error).__name__}: {self._error}")
        self._leave()

    def _leave(self) -> None:
        if self._near:
            self._near.close()
        self._held.close()

    def _open(self, state: Any) -> None:
        """Once: rank 0 makes the folder this run's, and removes what a killed save left."""
        if self._model:
            return
        table = self._adapter.describe(state)
        fingerprint = state_schema.fingerprint(table)
        self._opens += 1
        with together(self._barrier, f"{self._token}-{self._opens}/open"):
            if self._barrier.rank == 0:
                self._claim(table, fingerprint)
        self._model = fingerprint

    def _claim(self, table: dict[str, str], fingerprint: str) -> None:
        self._held.close()  # of a try that failed
        self._claim_one(self.folder, table, fingerprint, tier_copy.tokens(self._local) if self._local else ())
        if self._local and self._near:
            try:
                self._claim_one(self._local, table, fingerprint)
            except (NoSpace, ClusterError) as error:
                self._near.fails(error)

    def _claim_one(self, folder: Path, table: dict[str, str], fingerprint: str, keep: Collection[str] = ()) -> None:
        state_schema.require_same(folder, table)
        owner.claim(folder, self._run, fingerprint)
        sure = self._held.enter_context(locks.writing(folder))
        retention.sweep(folder, keep=keep, sure=sure)

    def _finish(self, step: int, meet: Meeting, staged: _Staged) -> None:
        """A save after its copy; in the background."""
        place = staged.place
        try:
            staged.payload.set_result(_made(place))
            known = {f"{layout.PAYLOAD}/{path}": found for path, found in (staged.write(meet) or {}).items()}
            meet(rng_state.encoded(staged.randomness), lambda all_of: self._describe(place, staged.table, all_of))
            rank, world_size = self._barrier.rank, self._barrier.world_size
            publish.digest_share(place, rank, world_size, writer=self._writer, known=known)
            meet(answer=lambda _: self._publish(step, place, staged.kept))
        except BaseException as error:  # noqa: BLE001  # raised by the next `wait`
            if not staged.payload.done():
                staged.payload.set_exception(error)
            self._error = told = as_ours(error, place)
            told.add_note(f"in the background, while step {step} was saved")
            meet.fail(told)

    def _describe(self, place: Path, table: dict[str, str], randomness: list[bytes]) -> list[bytes]:
        state_schema.write(place, table)
        rng_state.write(place, randomness)
        return []

    def _publish(self, step: int, place: Path, kept: dict[str, Any]) -> list[bytes]:
        folder = place.parent
        publish.publish(
            folder,
            place,
            step,
            format=self._adapter.format,
            run=self._run,
            model=self._model,
            world_size=self._barrier.world_size,
            loader=kept["loader"],
            extra=kept["extra"],
        )
        if self._near and folder == self._local:
            self._near.submit(step)
            return []
        retention.tidy(folder, *self._keep)
        return []

    def _writer(self, path: str, world_size: int) -> int:
        folder, _, name = path.partition("/")
        return self._adapter.writer(name, world_size) if folder == layout.PAYLOAD else 0


def _made(place: Path) -> Path:
    """The payload of a building folder; by every rank: to meet for it would cost more than to make it twice."""
    try:
        (place / layout.SHARES).mkdir(parents=True, exist_ok=True)
        layout.payload(place).mkdir(exist_ok=True)
    except OSError as error:
        raise os_error(error, place) from error
    return layout.payload(place)


def _in_background(target: Callable[..., None], *args: Any) -> threading.Thread:
    # A daemon: a write that never comes back must not keep the process from ending.
    thread = threading.Thread(target=target, args=args, name="checkpoint", daemon=True)
    thread.start()
    return thread
