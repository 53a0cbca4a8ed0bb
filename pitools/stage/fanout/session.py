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
from pitools.stage.fanout.group import Group, Patience
from pitools.stage.fanout.peer_source import PeerSource
from pitools.stage.fanout.peers import Absent, Peers
from pitools.stage.fanout.shared_state import SOURCE, Board
from pitools.stage.sources.base import Source
from pitools.store.manifest import FileEntry

_LOOK_S, _GLANCE_S, _ASK_S = 0.02, 0.002, 1.0
_LEAVE_S, _EARLY_S, _ANSWER_S = 1.0, 3.0, 0.1


class Received(NamedTuple):
    """Bytes this node took from the source and from other nodes; names of nodes that gave wrong ones."""

    source_bytes: int
    peer_bytes: int
    distrusted: tuple[str, ...]


class Fan:
    """What the stager needs: `source` to read from, `order` to read in, and to say when a file may be given away."""

    def __init__(self, source: PeerSource) -> None:
        self.source = source
        self._group, self._board = source.group, source.board

    def order(self) -> list[int]:
        """File numbers in the order in which this node should take them."""
        return assignment.order(self.source.files, self.source.owners, len(self._group), self._group.me)

    def groups(self) -> list[list[int]]:
        """`order`, cut where this node's place in the files' chains changes.

        That nodes never wait for each other in a circle rests on this: workers take the files in this order, and no
        file's `done` waits for a file of a later group.
        """
        owners, nodes, me = self.source.owners, len(self._group), self._group.me
        cut = groupby(self.order(), lambda index: assignment.place(index, owners[index], nodes, me))
        return [list(same) for _, same in cut]

    def done(self, index: int) -> None:
        """File `index` is verified and written, in one of the folders: others may have it. For any process."""
        self._board.mark(index)

    def all_done(self) -> None:
        """The whole version is here, in the last of the folders."""
        self._board.mark_all()

    def received(self) -> Received:
        """What came from where, of all files that have been closed."""
        counts = self._board.bytes_from()
        names = tuple(name for name, lied in zip(self._group.names, self._board.liar, strict=True) if lied)
        return Received(counts.pop(SOURCE, 0), counts.total(), names)

    def linger(self, timeout_s: float | None = None) -> None:
        """Serve on until every other node has all it wants, or is gone; timeout_s at most. Call when all is done."""
        patience = self.source.patience
        deadline = time.monotonic() + (patience.linger_s if timeout_s is None else timeout_s)
        self._board.finished[self._group.me] = 1
        peers = Peers(self._group, self.source.version, self._board, patience)
        waiting = {node for node in range(len(self._group)) if node != self._group.me}
        ask_at = 0.0
        with contextlib.closing(peers):
            while waiting and (now := time.monotonic()) < deadline:
                # All are told at once, also those that are known to have finished: they may wait for just this. Later
                # it is to see who has gone, and a thousand nodes must not spend their time asking each other.
                if now >= ask_at:
                    waiting = {node for node in waiting if self._is_at_work(peers, node)}
                    ask_at = time.monotonic() + _ASK_S * (1 + len(self._group) / 64)
                else:
                    time.sleep(_LOOK_S)
                    waiting = {node for node in waiting if not self._board.finished[node]}

    def leave(self) -> None:
        """Be seen by the others before this node is gone, in about a second: one that nobody has seen might yet come,
        and would be waited for. Where this node fails in its first moments, those that do not listen yet are visited as
        soon as they do.
        """
        deadline = max(time.monotonic() + _LEAVE_S, self._board.began + _EARLY_S)
        brief = msgspec.structs.replace(self.source.patience, answer_s=_ANSWER_S, hold_s=0.0, stall_s=_ANSWER_S)
        peers = Peers(self._group, self.source.version, self._board, brief)
        me, nodes = self._group.me, len(self._group)
        left = deque((me + step) % nodes for step in range(1, nodes))  # all may leave at once: not all to one
        with contextlib.closing(peers):
            while left and time.monotonic() < deadline:
                node = left.popleft()
                try:
                    # Not that it has finished: it may be started anew, and is then waited for like any other.
                    peers.tell(node, finished=False)
                except Absent:
                    if not self._board.seen[node]:  # otherwise it has gone
                        left.append(node)
                        time.sleep(_GLANCE_S)
                except protocol.Busy:
                    left.append(node)
                    time.sleep(_GLANCE_S)

    def _is_at_work(self, peers: Peers, node: int) -> bool:
        """Whether a node may still want something, telling it that this one does not."""
        try:
            return not peers.tell(node, finished=True)
        except protocol.Busy:
            return True
        except Absent:
            # One that was seen has gone; one that was not may yet come, for some time.
            appear_s = self.source.patience.appear_s
            return not self._board.seen[node] and time.monotonic() < self._board.began + appear_s


@contextmanager
def joined(
    origin: Source,
    files: Sequence[FileEntry],
    version: str,
    folders: Sequence[Path],
    group: Group,
    patience: Patience | None = None,
) -> Iterator[Fan]:
    """Take part: a server child runs until the block ends. Before workers and threads are started.

    folders: where finished files are: in the one being filled, and then, once `all_done`, in the one it is renamed to.
    Raises ClusterError when no port is free.
    """
    patience = patience or Patience()
    board = Board(len(files), len(group))
    try:
        listener = server.hold_port(group, version)
        child = server.start(server.Server(listener, group, version, files, folders, board, patience))
        fan = Fan(PeerSource(origin, files, version, group, board, patience))
        try:
            yield fan
        except BaseException:
            fan.leave()
            raise
        finally:
            server.stop(child)
    finally:
        board.close()
