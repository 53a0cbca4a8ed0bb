"""Save in the background and restore verified checkpoints: the class that a training loop uses.

    with Checkpointer(folder, OrbaxAdapter(), rank=…, world_size=…, put=…, get=…, delete=…) as checkpointer:
        if restored := checkpointer.restore(state):
            step, state, loader_state = restored.step, restored.state, restored.loader_state
        …
        checkpointer.save(step, state, loader_state)         blocks for a copy to this host's memory

The rest of a save runs in a thread, where barriers use a key-value store and never a collective, which would interleave
with the training's own:

    all ranks write ─▶ barrier ─▶ rank 0 finishes ─▶ all digest, fsync ─▶ barrier ─▶ rank 0 seals, renames ─▶ barrier
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pitools.checkpoint.adapters.base import Digests, as_pit_error
from pitools.checkpoint.adapters.base import FrameworkAdapter as FrameworkAdapter
from pitools.checkpoint.coordination.barrier import Delete, Get, Put
from pitools.checkpoint.coordination.exchange import SaveExchange, all_or_none, handshake
from pitools.checkpoint.search import RestoreSearch
from pitools.checkpoint.store import layout, locks, owner, publish, retention, rng_state, state_schema
from pitools.core.errors import ConfigError, PitError, Unreachable, UsageError
from pitools.run.steps import SAVE_TIMEOUT_S
from pitools.run.trace_capture import annotate

# How long a failed loop waits for an unfinished save: its peers may have died with it.
_LEAVE_TIMEOUT_S = 5.0
# The hang watch ends the run SAVE_TIMEOUT_S after a loop's last heartbeat: the error of a hung write comes before.
_HANG_MARGIN_S = 60.0


class Restored(NamedTuple):
    """A restored checkpoint. step: training steps done. loader_state, custom_metadata: as they were saved."""

    step: int
    state: Any
    loader_state: dict[str, Any]
    custom_metadata: dict[str, Any]


class _PendingSave(NamedTuple):
    """The arguments of a save's background part. payload: the folder in `unpublished_dir`, once created."""

    unpublished_dir: Path
    payload: Future[Path]
    write_payload: Callable[[SaveExchange], Digests | None]
    schema: dict[str, str]
    rng_states: rng_state.RngState
    manifest_fields: dict[str, Any]


class Checkpointer:
    """Save and restore the checkpoints of one run, at one rank. All ranks make the same calls in the same order.

    A context manager. Leaving it waits for the last save; after an error in the block, with several ranks, 5 s at most.
    """

    def __init__(
        self,
        folder: Path,
        adapter: FrameworkAdapter,
        *,
        rank: int = 0,
        world_size: int = 1,
        put: Put | None = None,
        get: Get | None = None,
        run: str = "",
        keep_last: int = retention.KEEP_LAST,
        keep_every: int = 0,
        timeout_s: float = 600.0,
        delete: Delete | None = None,
    ) -> None:
        """Connect the ranks in the store.

        put, get, delete: of a key-value store that all ranks share, with one open Checkpointer; not needed for one
        rank. run: the run's name.
        keep_last, keep_every: see `retention.prune_checkpoints`. timeout_s: how long the first rank waits for the last.
        Raises Unreachable, ConfigError.
        """
        # Absolute: orbax refuses any other, and a loop may change its working directory.
        self.folder, self._adapter, self._run = Path(folder).absolute(), adapter, run
        self._keep, self._timeout_s = (keep_last, keep_every), timeout_s
        self._barrier, self._token = handshake(put, get, delete, rank, world_size, timeout_s=timeout_s)
        self._schema: dict[str, str] | None = None  # of the first restore or save
        self._saved = -1
        self._thread: threading.Thread | None = None
        self._pruning: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saves = self._opens = self._restores = 0
        self._unpublished_dir, self._is_closed = None, False  # type: Path | None, bool
        self._locks = contextlib.ExitStack()

    def restore(self, like: Any) -> Restored | None:
        """Return the newest checkpoint whose bytes all match its manifest, in the structure of `like`, or None.

        Newer damaged checkpoints are moved to `quarantine`. Restores the random generators. Waits for an unfinished
        save. Raises that save's error; DataError if all checkpoints are damaged; ConfigError for the checkpoint of
        another run, and with the differing leaves if it has others than `like`.
        """
        schema = self._adapter.describe(like)
        self._open_once(schema)
        self._restores += 1
        name = f"{self._token}-r{self._restores}"
        if self._saves:
            with all_or_none(self._barrier, f"{name}/saved"):
                self.wait()
        search = RestoreSearch(self._barrier, self.folder, name, self._rank_of_file)
        with search.newest_good() as newest:
            if newest is None:
                return None
            manifest, path = newest
            with all_or_none(self._barrier, f"loading step {manifest.step}, {name}"):
                if manifest.format != self._adapter.format:
                    hint = "resume with the framework that wrote it, or give another checkpoint folder"
                    raise ConfigError(
                        f"written by {manifest.format} (expected {self._adapter.format})", where=str(path), hint=hint
                    )
                state_schema.require_same_as_saved(path, schema)
                state = self._adapter.load(layout.payload_path(path), like)
                rng_state.restore_rng_state(path, self._barrier.rank, self._adapter)
        self._saved = manifest.step
        return Restored(manifest.step, state, manifest.loader_state, manifest.custom_metadata)

    @annotate("checkpoint")
    def save(
        self, step: int, state: Any, loader_state: Any = None, custom_metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to save the state after `step` steps; `state` may change on return.

        loader_state: `state_dict()` of the loader. It and custom_metadata: plain values or records, by name; rank
        0's are stored. Waits for the previous save. Raises its error, a ConfigError if an earlier program saved that
        step; ConfigError for other values, and if the state has other leaves than at the first restore or save.
        """
        last_error = self._join_last_save()
        if step == self._saved:
            return
        schema = self._adapter.describe(state)
        self._open_once(schema)
        if self._saves and self._saved < 0 and self._unpublished_dir and self._barrier.rank == 0:
            layout.remove_tree(self._unpublished_dir)  # of the failed save: it would keep a full disk full
        self._saves += 1
        if last_error:
            raise last_error
        # Numbered: the same step may be saved again after a failure.
        token = f"{self._token}-{self._saves}"
        unpublished_dir = self._unpublished_dir = layout.unpublished_path(self.folder, step, token)
        exchange = SaveExchange(self._barrier, f"{token}/save of step {step}", unpublished_dir / layout.DIGESTS_DIR)
        payload: Future[Path] = Future()
        try:
            # A later `restore` with the `like` of this program would lose or miss the leaves that differ.
            state_schema.require_same(self._schema or {}, schema, f"save of step {step}")
            manifest_fields = _to_plain(loader_state, custom_metadata, f"save of step {step}")
            rng_states = rng_state.capture_rng_state(self._adapter)
            write = self._adapter.begin_save(state, payload)
        except BaseException as error:
            self._saved = -1
            payload.set_exception(error)
            _in_background(exchange.fail, error).join(_LEAVE_TIMEOUT_S)
            raise
        self._saved = step
        pending = _PendingSave(unpublished_dir, payload, write, schema, rng_states, manifest_fields)
        self._thread = _in_background(self._finish_save, step, exchange, pending)

    def wait(self) -> None:
        """Wait until the last save is durable at every rank. Raises its error."""
        if error := self._join_last_save():
            raise error

    def poll(self) -> None:
        """Raise the error of a failed save once all ranks know it, without waiting; else the next `save` raises it.

        A rank that raised before its peers would end them in a collective, whose error hides the cause.
        """
        if self._error and self._thread and not self._thread.is_alive():
            self.wait()

    def _join_last_save(self) -> BaseException | None:
        """Wait for the last save; return its error."""
        if self._thread:
            # The barriers have time-outs; this one is for a file system that holds this rank's own write.
            limit_s = SAVE_TIMEOUT_S - _HANG_MARGIN_S
            self._thread.join(limit_s)
            if self._thread.is_alive():
                message = f"save of step {self._saved}: timed out ({limit_s:g} s): its write hangs"
                raise Unreachable(message, where=str(self.folder), hint="check that the file system answers: ls")
            self._thread = None
        error, self._error = self._error, None
        if error:
            self._saved = -1
        return error

    def close(self) -> None:
        """Wait for the last save, then release the folder."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with all_or_none(self._barrier, f"{self._token}/end"):
                self.wait()
        finally:
            self._release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        if not self._is_closed:  # to the ranks that have finished their loop
            self._is_closed = True
            _in_background(self._report_error, error).join(_LEAVE_TIMEOUT_S)
        if self._thread:
            self._thread.join(self._timeout_s if self._barrier.world_size == 1 else _LEAVE_TIMEOUT_S)
        if self._error and self._error is not error:
            error.add_note(f"before that, in the background: {type(self._error).__name__}: {self._error}")
        self._release()

    def _report_error(self, error: BaseException) -> None:
        with contextlib.suppress(PitError):
            self._barrier.report(f"{self._token}/end", error)

    def _release(self) -> None:
        if self._pruning:
            self._pruning.join(_LEAVE_TIMEOUT_S)  # the next attempt removes the rest
        if not (self._thread and self._thread.is_alive()):  # else the process's end releases the lock
            self._locks.close()

    def _open_once(self, schema: dict[str, str]) -> None:
        """Claim the folder for this run and remove what killed saves left, once, at rank 0."""
        if self._is_closed:  # without the lock another Checkpointer would take the save for a killed one's leftover
            raise UsageError("Checkpointer: closed", where=str(self.folder), hint="save and restore within its `with`")
        if self._schema is not None:
            return
        self._opens += 1
        with all_or_none(self._barrier, f"{self._token}-{self._opens}/open"):
            if self._barrier.rank == 0:
                self._claim_folder(schema)
        self._schema = schema

    def _claim_folder(self, schema: dict[str, str]) -> None:
        self._locks.close()  # of a failed attempt
        state_schema.require_same_schema(self.folder, schema)
        owner.claim_folder(self.folder, self._run, state_schema.schema_fingerprint(schema))
        is_only_writer = self._locks.enter_context(locks.writer_lock(self.folder))
        retention.remove_leftovers(self.folder, is_only_writer=is_only_writer)

    def _finish_save(self, step: int, exchange: SaveExchange, pending: _PendingSave) -> None:
        """Finish a save after its copy to host memory, in the background."""
        unpublished_dir = pending.unpublished_dir
        try:
            pending.payload.set_result(layout.create_payload_dir(unpublished_dir))
            known_digests = {
                f"{layout.PAYLOAD}/{path}": digest for path, digest in (pending.write_payload(exchange) or {}).items()
            }
            exchange(
                rng_state.encode_rng_state(pending.rng_states),
                lambda all_of: self._write_metadata(unpublished_dir, pending.schema, all_of),
            )
            rank, world_size = self._barrier.rank, self._barrier.world_size
            publish.digest_share(
                unpublished_dir, rank, world_size, rank_of_file=self._rank_of_file, known_digests=known_digests
            )
            exchange(at_rank0=lambda _: self._publish(step, pending))
            # In another thread: the next save waits for this one, and the other ranks for that.
            if rank == 0 and not (self._pruning and self._pruning.is_alive()):
                self._pruning = _in_background(retention.prune_after_save, self.folder, *self._keep)
        except BaseException as error:  # noqa: BLE001  # raised by the next `wait`
            if not pending.payload.done():
                pending.payload.set_exception(error)
                # Its threads raise it too, and are waited for: one that is still at work as Python ends may abort it.
                with contextlib.suppress(BaseException):
                    pending.write_payload(exchange)
            self._error = raised = as_pit_error(error, unpublished_dir)
            raised.add_note(f"in the background, while step {step} was saved")
            exchange.fail(raised)

    def _write_metadata(self, unpublished_dir: Path, schema: dict[str, str], rng_states: list[bytes]) -> list[bytes]:
        state_schema.write_schema(unpublished_dir, schema)
        rng_state.write_rng_state(unpublished_dir, rng_states)
        return []

    def _publish(self, step: int, pending: _PendingSave) -> list[bytes]:
        publish.publish_checkpoint(
            self.folder,
            pending.unpublished_dir,
            step,
            format=self._adapter.format,
            run=self._run,
            state_fingerprint=state_schema.schema_fingerprint(pending.schema),
            world_size=self._barrier.world_size,
            **pending.manifest_fields,
        )
        return []

    def _rank_of_file(self, path: str, world_size: int) -> int:
        folder, _, name = path.partition("/")
        return self._adapter.rank_of_file(name, world_size) if folder == layout.PAYLOAD else 0


def _to_plain(loader_state: Any, custom_metadata: Mapping[str, Any] | None, where: str) -> dict[str, dict[str, Any]]:
    """Return the values that a save stores. Raises ConfigError for values that JSON cannot hold."""
    try:
        fields = msgspec.to_builtins(
            {"loader_state": loader_state or {}, "custom_metadata": dict(custom_metadata or {})}
        )
        msgspec.json.encode(fields)
        return msgspec.convert(fields, dict[str, dict[str, Any]])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        hint = "give numbers (.item()), lists (.tolist()) and text, by names"
        raise ConfigError(
            f"loader_state, custom_metadata: not plain values: {error}", where=where, hint=hint
        ) from error


def _in_background(target: Callable[..., None], *args: Any) -> threading.Thread:
    # A daemon: a write that hangs must not keep the process from ending.
    thread = threading.Thread(target=target, args=args, name="checkpoint", daemon=True)
    thread.start()
    return thread
