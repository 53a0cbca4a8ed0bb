"""A node's part in a fan-out, from its first moment to its last: what the stager holds while it stages."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.stage.fanout import assignment, protocol, server
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.peer_source import PeerSource
from pitools.stage.fanout.peers import PeerNotFound, Peers
from pitools.stage.fanout.shared_state import FROM_ORIGIN, SharedState
from pitools.stage.sources.base import Source
from pitools.store.manifest import FileEntry

_POLL_S, _FIRST_POLL_S, _QUERY_EVERY_S = 0.02, 0.002, 1.0
_ANNOUNCE_TIMEOUT_S, _STARTUP_S, _ANNOUNCE_ANSWER_S = 1.0, 3.0, 0.1


class Received(NamedTuple):
    """Bytes this node took from the source and from other nodes; names of nodes that gave wrong ones."""

    source_bytes: int
    peer_bytes: int
    distrusted: tuple[str, ...]


class FanoutSession:
    """What the stager needs: `source` to read from, `file_order` to read in, and to say when a file may be given
    away."""

    def __init__(self, source: PeerSource) -> None:
        self.source = source
        self._group, self._state = source.group, source.state

    def file_order(self) -> list[int]:
        """File numbers in the order in which this node should take them."""
        return assignment.file_order(self.source.files, self.source.owners, len(self._group), self._group.me)

    def file_groups(self) -> list[list[int]]:
        """`order`, cut where this node's place in the files' chains changes.

        That nodes never wait for each other in a circle rests on this: workers take the files in this order, and no
        file's `done` waits for a file of a later group.
        """
        owners, nodes, me = self.source.owners, len(self._group), self._group.me
        cut = groupby(self.file_order(), lambda index: assignment.place_in_chain(index, owners[index], nodes, me))
        return [list(same) for _, same in cut]

    def mark_done(self, index: int) -> None:
        """File `index` is verified and written, in one of the folders: others may have it. For any process."""
        self._state.mark_done(index)

    def mark_all_done(self) -> None:
        """The whole version is here, in the last of the folders."""
        self._state.mark_all_done()

    def received(self) -> Received:
        """What came from where, of all files that have been closed."""
        counts = self._state.bytes_by_sender()
        names = tuple(name for name, lied in zip(self._group.names, self._state.untrusted, strict=True) if lied)
        return Received(counts.pop(FROM_ORIGIN, 0), counts.total(), names)

    def serve_until_done(self, timeout_s: float | None = None) -> None:
        """Serve on until every other node has all it wants, or is gone; timeout_s at most. Call when all is done."""
        timeouts = self.source.timeouts
        deadline = time.monotonic() + (timeouts.linger_s if timeout_s is None else timeout_s)
        self._state.finished[self._group.me] = 1
        peers = Peers(self._group, self.source.version, self._state, timeouts)
        waiting = {node for node in range(len(self._group)) if node != self._group.me}
        ask_at = 0.0
        with contextlib.closing(peers):
            while waiting and (now := time.monotonic()) < deadline:
                # All are told at once, also those that are known to have finished: they may wait for just this. Later
                # it is to see who has gone, and a thousand nodes must not spend their time asking each other.
                if now >= ask_at:
                    waiting = {node for node in waiting if self._is_at_work(peers, node)}
                    ask_at = time.monotonic() + _QUERY_EVERY_S * (1 + len(self._group) / 64)
                else:
                    time.sleep(_POLL_S)
                    waiting = {node for node in waiting if not self._state.finished[node]}

    def announce_exit(self) -> None:
        """Be seen by the others before this node is gone, in about a second: one that nobody has seen might yet come,
        and would be waited for. Where this node fails in its first moments, those that do not listen yet are visited as
        soon as they do.
        """
        deadline = max(time.monotonic() + _ANNOUNCE_TIMEOUT_S, self._state.began + _STARTUP_S)
        short_timeouts = msgspec.structs.replace(
            self.source.timeouts, answer_s=_ANNOUNCE_ANSWER_S, hold_s=0.0, stall_s=_ANNOUNCE_ANSWER_S
        )
        peers = Peers(self._group, self.source.version, self._state, short_timeouts)
        me, nodes = self._group.me, len(self._group)
        pending = deque((me + step) % nodes for step in range(1, nodes))  # all may leave at once: not all to one
        with contextlib.closing(peers):
            while pending and time.monotonic() < deadline:
                node = pending.popleft()
                try:
                    # Not that it has finished: it may be started anew, and is then waited for like any other.
                    peers.exchange_state(node, finished=False)
                except PeerNotFound:
                    if not self._state.contacted[node]:  # otherwise it has gone
                        pending.append(node)
                        time.sleep(_FIRST_POLL_S)
                except protocol.PeerBusy:
                    pending.append(node)
                    time.sleep(_FIRST_POLL_S)

    def _is_at_work(self, peers: Peers, node: int) -> bool:
        """Whether a node may still want something, telling it that this one does not."""
        try:
            return not peers.exchange_state(node, finished=True)
        except protocol.PeerBusy:
            return True
        except PeerNotFound:
            # One that was seen has gone; one that was not may yet come, for some time.
            appear_s = self.source.timeouts.startup_s
            return not self._state.contacted[node] and time.monotonic() < self._state.began + appear_s


@contextmanager
def join(
    origin: Source,
    files: Sequence[FileEntry],
    version: str,
    folders: Sequence[Path],
    group: Group,
    timeouts: Timeouts | None = None,
) -> Iterator[FanoutSession]:
    """Take part: a server child runs until the block ends. Before workers and threads are started.

    folders: where finished files are: in the one being filled, and then, once `all_done`, in the one it is renamed to.
    Raises ClusterError when no port is free.
    """
    timeouts = timeouts or Timeouts()
    state = SharedState(len(files), len(group))
    try:
        listener = server.hold_port(group, version)
        child = server.start_server(server.FanoutServer(listener, group, version, files, folders, state, timeouts))
        session = FanoutSession(PeerSource(origin, files, version, group, state, timeouts))
        try:
            yield session
        except BaseException:
            session.announce_exit()
            raise
        finally:
            server.stop_server(child)
    finally:
        state.close()
