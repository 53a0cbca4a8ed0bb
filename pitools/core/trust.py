"""Whether only this user and root decide what a file holds: what others can change must not decide what runs as us."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pitools.core.errors import ConfigError

_MAX_LINKS = 40  # as the kernel follows
_OVERFLOW_UID = 65534  # the uid that a container shows for every user of the host whom it does not know


def require_trusted(
    path: Path,
    description: str,
    *,
    group_above: bool = False,
    inside: bool = False,
    trusted_user: str = "",
    alternative: str = "",
) -> None:
    """Refuse a file or folder that anybody but this user and root could change or exchange.

    description: the thing, for the error, such as "site file". group_above: folders above it may be writable by a group
    of this user, and may belong to others of that group. inside: what counts is not the folder, but what this user is
    about to make in it: a sticky one will do. trusted_user: a system account that is trusted as root is. otherwise:
    what else to do about a folder above it that is a group's. Raises ConfigError, which names the first file, link or
    folder on the way that others can change.
    """
    users = _trusted(trusted_user)
    try:
        steps = list(_path_components(path.absolute()))
    except OSError as error:
        hint = "it is a dangling link" if path.is_symlink() and error.errno == errno.ENOENT else ""
        raise ConfigError(f"{description}: cannot be read: {error.strerror}", where=str(path), hint=hint) from error
    open_above, last = False, None if inside else steps[-1][0]
    for at, found in steps:
        may_be_group_s = group_above and at != last and stat.S_ISDIR(found.st_mode)
        of_group = may_be_group_s and not open_above and found.st_gid in _groups()
        hint = f"; {alternative}" if alternative and not group_above and found.st_gid in _groups() else ""
        if found.st_uid not in users and not of_group:
            user = user_name(found.st_uid)
            hint = f"chown it, or use a copy of your own where you trust {user}: cp -r {path} COPY{hint}"
            raise _untrusted_error(path, description, at, f"belongs to user {user} (expected you or root)", hint)
        if stat.S_ISLNK(found.st_mode):
            continue
        open_above = bool(found.st_mode & stat.S_IWOTH)
        keeps_entries = at != last and found.st_mode & stat.S_ISVTX
        if not keeps_entries and (who := _other_writers(found, allow_group=may_be_group_s)):
            problem = f"can be written by {who} (expected you and root alone)"
            raise _untrusted_error(path, description, at, problem, f"chmod {'o-w' if open_above else 'g-w'} {at}{hint}")


def _untrusted_error(path: Path, what: str, at: Path, problem: str, hint: str) -> ConfigError:
    which = what if at == path.absolute() else f"{what} {path}: a {'link' if at.is_symlink() else 'folder'} on the way"
    return ConfigError(f"{which} {problem}: it would decide what runs as you", where=str(at), hint=hint)


def _path_components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and link that leads to a file, then the file, each with its own status. Raises OSError."""
    at, left, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield at, at.lstat()
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        found = (at / part).lstat()
        yield at / part, found
        if not stat.S_ISLNK(found.st_mode):
            at = at / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (at / part).readlink()
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _other_writers(found: os.stat_result, *, allow_group: bool) -> str:
    """Who else may write there, by its mode: "everybody", a group, or ""."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid, found.st_uid):
        return "" if allow_group and found.st_gid in _groups() else f"group {_group(found.st_gid)}"
    return ""


@lru_cache(maxsize=64)
def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group is root's, or a user's private one: of their name, their first, and with no other member."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}


def _trusted(also: str) -> set[int]:
    users = {os.geteuid(), 0}
    if also and (account := _account(also)) is not None:
        users.add(account)
    return users | ({_OVERFLOW_UID} if _is_uid_mapped() else set())


@lru_cache(maxsize=8)
def _account(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


@lru_cache(maxsize=1)
def _is_uid_mapped() -> bool:
    """Whether this process is in a container that shows root of the host, as anybody unknown, as _OVERFLOW."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return False
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return bool(ranges) and not any(first <= _OVERFLOW_UID < first + count for first, count in ranges)


def _groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def user_name(uid: int) -> str:
    """A user's name, or their number where no name is known, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
