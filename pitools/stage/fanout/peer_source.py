"""The source that the copy workers read in a fan-out: other nodes where they have the file, else the origin."""

from __future__ import annotations

from collections.abc import Sequence

from pitools.core.errors import DataError
from pitools.stage.fanout import assignment
from pitools.stage.fanout.group import Group, Timeouts
from pitools.stage.fanout.peers import PeerConnection, Peers, PeerTooSlow
from pitools.stage.fanout.server import MAX_RANGE_BYTES
from pitools.stage.fanout.shared_state import FROM_ORIGIN, SharedState
from pitools.stage.sources.base import Source, SourceFile, SourceReader
from pitools.store.manifest import FileEntry

_BLOCK = 1 << 20


class PeerSource:
    """A Source: this node's share of the files from `origin`, the other files from the nodes that own them."""

    def __init__(
        self,
        origin: Source,
        files: Sequence[FileEntry],
        version: str,
        group: Group,
        state: SharedState,
        timeouts: Timeouts,
    ) -> None:
        self.origin, self.files, self.version = origin, files, version
        self.group, self.state, self.timeouts = group, state, timeouts
        self.owners = assignment.assign_owners(files, len(group))
        self._index = {entry.path: index for index, entry in enumerate(files)}

    @property
    def label(self) -> str:
        """Return the origin's label: the bytes come from there, through any number of nodes."""
        return self.origin.label

    @property
    def block(self) -> int:
        """Return the bytes of one read: larger for a socket than for a file system."""
        return max(_BLOCK, self.origin.block)

    def connect(self) -> PeerReader:
        """Return a reader, for one thread; call it after the fork."""
        return PeerReader(self)

    def index(self, path: str) -> int:
        """Return a file's index. Raises DataError for a path that the manifest does not list."""
        try:
            return self._index[path]
        except KeyError:
            raise DataError("the manifest does not name this file", where=f"{self.label}/{path}") from None

    def distrust(self, path: str) -> bool:
        """Mark a completely read file as wrong: it is read from the origin from now on, and its senders are not queried
        again. Returns False when only the origin sent it, so that the origin itself is wrong.
        """
        index = self.index(path)
        if self.state.source_only[index]:
            return False  # already read from the origin only
        senders = self.state.senders(index)
        self.state.distrust(index, senders)
        return bool(senders)


class PeerReader:
    """A SourceReader: one thread's connections."""

    def __init__(self, source: PeerSource) -> None:
        self.source = source
        self.peers = Peers(source.group, source.version, source.state, source.timeouts)
        self._origin: SourceReader | None = None

    def open(self, path: str) -> PeerFile:
        """Open a file of the manifest. Raises as the origin's `open` where the origin is needed."""
        return PeerFile(self, self.source.index(path))

    def origin(self) -> SourceReader:
        """Return the origin's reader, opened at the first call."""
        if self._origin is None:
            self._origin = self.source.origin.connect()
        return self._origin

    def close(self) -> None:
        """Close all connections."""
        self.peers.close()
        if self._origin is not None:
            self._origin.close()
            self._origin = None


class PeerFile:
    """A SourceFile. A failed read is resumed at the same byte from another node, or from the origin.

    size: bytes, by the manifest; an origin of another size is refused.
    """

    def __init__(self, reader: PeerReader, index: int) -> None:
        self._reader, self._index = reader, index
        source = reader.source
        self._entry, self._state = source.files[index], source.state
        self.size = self._entry.bytes
        self._chain = assignment.sender_chain(index, source.owners[index], len(source.group))
        self._node, self._is_retry = next(self._chain), False
        self._connection: PeerConnection | None = None
        self._offset = 0  # in the file, of the connection's next byte
        self._origin: SourceFile | None = None
        self._counts: dict[int, int] = {}
        self._last_failure = (-1, -1)  # node and offset of the last failure
        if self._is_own_share():
            self._origin = self._open_origin()

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; return the count, 0 at the end. Waits for nodes that still read the file.

        Raises as the origin's `read_into`.
        """
        while self._origin is None:
            if offset >= self._entry.bytes:
                return 0
            if count := self._read_from_peer(view, offset):
                return count
        count = self._origin.read_into(view, offset)
        self._count_bytes(FROM_ORIGIN, count)
        return count

    def distrust(self) -> bool:
        """Discard what was read, which differs from the manifest: its senders are not queried again by any thread.

        Returns True when the file is to be read again, from the origin; False when it came from there.
        """
        self._record_senders()
        return self._reader.source.distrust(self._entry.path)

    def close(self) -> None:
        """Record the bytes received per sender, and return the connection to the pool."""
        self._close_connection()
        self._record_senders()
        if self._origin:
            self._origin.close()
            self._origin = None

    def _is_own_share(self) -> bool:
        return self._node == self._reader.source.group.rank or bool(self._state.source_only[self._index])

    def _read_from_peer(self, view: memoryview, offset: int) -> int:
        """Read from the current node of the chain; return 0 when the next node, or the origin, is to be tried."""
        if self._is_own_share():
            self._close_connection()
            self._origin = self._open_origin()
            return 0
        if self._connection is None or self._offset != offset:
            self._close_connection()
            # To the end of the current range: with one request the node sends while this one hashes.
            end = min(self._entry.bytes, (offset // MAX_RANGE_BYTES + 1) * MAX_RANGE_BYTES)
            request = self._reader.peers.request_file
            self._connection = request(self._node, self._index, offset, end - offset, is_retry=self._is_retry)
            self._offset = offset
            if self._connection is None:
                self._node, self._is_retry = next(self._chain), True
                return 0
        try:
            count = self._connection.read_into(view)
        except (OSError, PeerTooSlow) as error:
            self._close_connection()
            if isinstance(error, PeerTooSlow) or self._last_failure == (self._node, offset):
                self._state.back_off(self._node, self._reader.source.timeouts.back_off_s)
            self._last_failure = self._node, offset
            return 0  # the same node again, unless it is now backed off from
        self._offset += count
        self._count_bytes(self._node, count)
        if not self._connection.remaining_bytes:
            self._close_connection()
        return count

    def _open_origin(self) -> SourceFile:
        file = self._reader.origin().open(self._entry.path)
        if file.size != self._entry.bytes:
            file.close()
            message = f"{file.size} bytes (expected {self._entry.bytes}, as in the manifest)"
            where = f"{self._reader.source.label}/{self._entry.path}"
            raise DataError(message, where=where, hint="it was changed or cut short: run `check` on the source")
        return file

    def _count_bytes(self, node: int, count: int) -> None:
        self._state.add_received(count)
        self._counts[node] = self._counts.get(node, 0) + count

    def _record_senders(self) -> None:
        for node, count in self._counts.items():
            self._state.record_sender(self._index, node, count)
        self._counts.clear()

    def _close_connection(self) -> None:
        if self._connection:
            self._reader.peers.put_back(self._connection)
            self._connection = None
