"""Blames: what users' runs found of nodes, in a folder of the spool into which the runs of all users write.

SPOOL/suspicions/UID.*.jsonl    pit.node-blame/1, written by the user's own processes

The controller makes the folder, with mode 1777: `chmod 0755` on it ends what users report. Who owns a file is its user,
whatever its name; nobody can take a name before, as a part of it is random. Files are looked at in random order, each
user's newest count, and no folder keeps files from being found. A user who fills the file system ends all reports, as
quotas or a file system of the folder's own prevent.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import stat
import time
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.output import printable
from pitools.core.record import Record, decode_json
from pitools.node import spool as spool_folder
from pitools.node.types import NAME
from pitools.run.attempt_records import CauseKind, Confidence

MAX_NODES_OF_USER = 8
"""How many nodes the blames of a user suspect at most."""

_FOLDER = "suspicions"
_MAX_FILES_OF_USER, _MAX_ENTRIES, _MAX_BYTES = 64, 500_000, 1 << 14
_DAY_S = 86400.0
_READ_S, _CLEAN_S = 2.0, 10.0
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)


class NodeBlame(Record, frozen=True, kw_only=True, tag="pit.node-blame/1"):
    """What the recovery of a run found: a cause that blames this node.

    rule: the name of the pattern that matched, or Slurm's state; never a line of a log, as every user can read it.
    user: by the file's owner, whatever the line says.
    """

    node: str
    kind: CauseKind
    confidence: Confidence
    run: str
    at: str
    rule: str = ""
    user: str = ""


def make_folder(spool: Path) -> None:
    """Make the folder, to which every user may add files, and remove those that count no more, for _CLEAN_S.

    A user's folder that is not empty stays. Raises OSError if it cannot be made.
    """
    folder, made = spool / _FOLDER, spool / f".{_FOLDER}"
    if not folder.exists():  # with its mode, or not at all: another mode is a person's
        made.mkdir(exist_ok=True)
        made.chmod(0o1777)
        made.rename(folder)
    until = time.monotonic() + _CLEAN_S
    _, files, folders = _list_files(folder, until - _CLEAN_S / 2)
    removals = [(Path.unlink, path) for path in files] + [(Path.rmdir, path) for path in folders]
    for remove, path in removals:  # folders last: all may have to stay
        if time.monotonic() > until:
            return
        with contextlib.suppress(OSError):
            remove(path)


def _list_files(folder: Path, until: float) -> tuple[list[tuple[int, Path]], list[Path], list[Path]]:
    """Return the newest files of each user, with its uid; other files, which count no more; and folders.

    Users decide how much is there. until: of the monotonic clock; what was not looked at by then is in none of them.
    """
    files: list[os.DirEntry[str]] = []
    folders: list[Path] = []
    by_uid: dict[int, list[tuple[float, Path]]] = {}
    old: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, _MAX_ENTRIES):
            if entry.is_dir(follow_symlinks=False):  # known without a call for each
                folders.append(Path(entry.path))
            else:
                files.append(entry)
    random.shuffle(files)
    for entry in files:
        if time.monotonic() > until:
            break
        with contextlib.suppress(OSError):  # removed meanwhile
            status = entry.stat(follow_symlinks=False)
            is_one = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= _MAX_BYTES
            if is_one and status.st_mtime > time.time() - _DAY_S:
                by_uid.setdefault(status.st_uid, []).append((status.st_mtime, Path(entry.path)))
            else:
                old.append(Path(entry.path))
    kept = []
    for uid, of_user in by_uid.items():
        of_user.sort(reverse=True)
        kept += [(rank, uid, path) for rank, (_, path) in enumerate(of_user[:_MAX_FILES_OF_USER])]
        old += [path for _, path in of_user[_MAX_FILES_OF_USER:]]
    kept.sort(key=lambda one: one[0])  # in turns: one user's many files come after the others' newest
    return [(uid, path) for _, uid, path in kept], old, folders


def read_blames(spool: Path, nodes: Collection[str]) -> list[NodeBlame]:
    """Return what users' runs found of these nodes; what is foreign, damaged or hostile is left out.

    After _READ_S what was not read yet is left out, too: no user's files keep a run from the rest.
    """
    until = time.monotonic() + _READ_S
    kept, _, _ = _list_files(spool / _FOLDER, until - _READ_S / 2)
    blames: list[NodeBlame] = []
    for uid, path in kept:
        if time.monotonic() > until:
            break
        blames += _read_file(path, uid, nodes)
    return blames


def _read_file(path: Path, uid: int, nodes: Collection[str]) -> list[NodeBlame]:
    try:
        lines = spool_folder.read_owned(path, (uid,), _MAX_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    blames: list[NodeBlame] = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            one = decode_json(line, NodeBlame)
            if one.node in nodes and NAME.fullmatch(one.run) and _TIME.fullmatch(one.at):
                blames.append(one)
    user = trust.user_name(uid) if blames else ""
    return [msgspec.structs.replace(one, rule=printable(one.rule)[:80], user=user) for one in blames]


def write_blames(spool: Path, blames: Sequence[NodeBlame]) -> None:
    """Write a new file of this user, with as many blames as count. Raises OSError."""
    path = spool / _FOLDER / f"{os.geteuid()}.{secrets.token_hex(8)}.jsonl"
    lines = [msgspec.json.encode(one) + b"\n" for one in blames if NAME.fullmatch(one.node)]
    if not lines:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except (FileNotFoundError, PermissionError):  # this site does not collect them
        return
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)  # under any umask
        file.writelines(lines[:MAX_NODES_OF_USER])
