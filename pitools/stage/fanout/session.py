"""A node's part in a fan-out, from joining to leaving: the stager's interface."""

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
    """Bytes received from the source and from other nodes. distrusted: names of nodes that sent wrong bytes."""

    source_bytes: int
    peer_bytes: int
    distrusted: tuple[str, ...]


class FanoutSession:
    """The stager's side of a fan-out: `source` to read from, `file_order` to read in, `mark_done` for finished
    files.
    """

    def __init__(self, source: PeerSource) -> None:
        self.source = source
        self._group, self._state = source.group, source.state

    def file_order(self) -> list[int]:
        """Return the file indexes in the order in which this node should copy them."""
        return assignment.file_order(self.source.files, self.source.owners, len(self._group), self._group.rank)

    def file_groups(self) -> list[list[int]]:
        """Return `file_order` in groups, one for each position of this node in the files' chains.

        The absence of circular waits rests on this: workers take files in this order, and no file's `mark_done` waits
        for a file of a later group.
        """
        owners, nodes, rank = self.source.owners, len(self._group), self._group.rank
        groups = groupby(self.file_order(), lambda index: assignment.chain_position(index, owners[index], nodes, rank))
        return [list(group) for _, group in groups]

    def mark_done(self, index: int) -> None:
        """Mark file `index` as verified and written in one of the folders, so that other nodes may read it; for any
        process.
        """
        self._state.mark_done(index)

    def mark_all_done(self) -> None:
        """Mark the whole version as complete in the last of the folders."""
        self._state.mark_all_done()

    def received(self) -> Received:
        """Return the bytes by sender of all closed files."""
        counts = self._state.bytes_by_sender()
        names = tuple(name for name, bad in zip(self._group.names, self._state.untrusted, strict=True) if bad)
        return Received(counts.pop(FROM_ORIGIN, 0), counts.total(), names)

    def serve_until_done(self, timeout_s: float | None = None) -> None:
        """Keep serving until every other node has finished or is lost, at most `timeout_s` seconds. Call it when all is
        done.
        """
        timeouts = self.source.timeouts
        deadline = time.monotonic() + (timeouts.linger_s if timeout_s is None else timeout_s)
        self._state.finished[self._group.rank] = 1
        peers = Peers(self._group, self.source.version, self._state, timeouts)
        unfinished = {node for node in range(len(self._group)) if node != self._group.rank}
        next_query_at = 0.0
        with contextlib.closing(peers):
            while unfinished and (now := time.monotonic()) < deadline:
                # The first round informs every node, also finished ones, which may wait for this. Later rounds only
                # detect lost nodes; their interval grows with the group, so that 1,000 nodes are not kept busy by it.
                if now >= next_query_at:
                    unfinished = {node for node in unfinished if self._may_need_files(peers, node)}
                    next_query_at = time.monotonic() + _QUERY_EVERY_S * (1 + len(self._group) / 64)
                else:
                    time.sleep(_POLL_S)
                    unfinished = {node for node in unfinished if not self._state.finished[node]}

    def announce_exit(self) -> None:
        """Contact the other nodes before this one fails, in about a second; they would wait for a node that they have
        never contacted. If this node fails at its start, nodes that do not listen yet are retried until they do.
        """
        deadline = max(time.monotonic() + _ANNOUNCE_TIMEOUT_S, self._state.started_at + _STARTUP_S)
        short_timeouts = msgspec.structs.replace(
            self.source.timeouts, answer_s=_ANNOUNCE_ANSWER_S, long_poll_s=0.0, stall_s=_ANNOUNCE_ANSWER_S
        )
        peers = Peers(self._group, self.source.version, self._state, short_timeouts)
        rank, nodes = self._group.rank, len(self._group)
        pending = deque((rank + step) % nodes for step in range(1, nodes))  # from the next rank on
        with contextlib.closing(peers):
            while pending and time.monotonic() < deadline:
                node = pending.popleft()
                try:
                    # Not as finished: a restarted node takes part like any other.
                    peers.exchange_state(node, finished=False)
                except PeerNotFound:
                    if not self._state.contacted[node]:  # else it is lost
                        pending.append(node)
                        time.sleep(_FIRST_POLL_S)
                except protocol.PeerBusy:
                    pending.append(node)
                    time.sleep(_FIRST_POLL_S)

    def _may_need_files(self, peers: Peers, node: int) -> bool:
        """Whether a node may still need files; also reports to it that this node has finished."""
        try:
            return not peers.exchange_state(node, finished=True)
        except protocol.PeerBusy:
            return True
        except PeerNotFound:
            # A node that was contacted before is lost; another may still start, until `startup_s`.
            startup_s = self.source.timeouts.startup_s
            return not self._state.contacted[node] and time.monotonic() < self._state.started_at + startup_s


@contextmanager
def join(
    origin: Source,
    files: Sequence[FileEntry],
    version: str,
    folders: Sequence[Path],
    group: Group,
    timeouts: Timeouts | None = None,
) -> Iterator[FanoutSession]:
    """Join the fan-out: a server process runs until the block ends. Call it before workers and threads start.

    folders: where finished files are: the folder being filled, then the published one, used after `mark_all_done`.
    Raises ClusterError when no port is free.
    """
    timeouts = timeouts or Timeouts()
    state = SharedState(len(files), len(group))
    try:
        listener = server.listen(group, version)
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
