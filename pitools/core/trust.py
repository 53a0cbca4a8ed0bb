"""Check that only this user and root can change a file: its content decides what runs as this user."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Set
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import ConfigError

_MAX_LINKS = 40  # as the kernel follows
_OVERFLOW_UID = 65534  # the uid of all unmapped users in a container


class Untrusted(NamedTuple):
    """A file, link or folder on a path that others can change. writer: who may write to it, "" if it is another
    user's.
    """

    path: Path
    status: os.stat_result
    writer: str


def find_untrusted(
    path: Path, users: Set[int], *, group_above: bool = False, owners_above: bool = False, inside: bool = False
) -> Untrusted | None:
    """Return the first file, link or folder on a path that others than these users could change or replace.

    group_above, inside: as in `require_trusted`. owners_above: parent folders may belong to any user, except inside one
    that everybody may write to, such as /tmp. Raises OSError.
    """
    components = list(_path_components(path.absolute()))
    open_above, target = False, None if inside else components[-1][0]
    for step, status in components:
        may_be_group_s = group_above and step != target and stat.S_ISDIR(status.st_mode)
        of_group = may_be_group_s and not open_above and status.st_gid in _groups()
        of_any_owner = owners_above and step != target and not open_above
        if status.st_uid not in users and not of_group and not of_any_owner:
            return Untrusted(step, status, "")
        if stat.S_ISLNK(status.st_mode):
            continue
        open_above = bool(status.st_mode & stat.S_IWOTH)
        keeps_entries = step != target and status.st_mode & stat.S_ISVTX
        if not keeps_entries and (writer := other_writers(status, allow_group=may_be_group_s)):
            return Untrusted(step, status, writer)
    return None


def require_trusted(
    path: Path,
    description: str,
    *,
    group_above: bool = False,
    inside: bool = False,
    trusted_user: str = "",
    alternative: str = "",
) -> None:
    """Refuse a file or folder that others than this user and root could change or replace.

    description: the noun in the error, such as "site file". group_above: parent folders may be writable by a group of
    this user, and may belong to its members. inside: this user is about to create a file in the folder, for which a
    sticky folder is enough. trusted_user: a system account that is trusted as root is. alternative: another hint for a
    parent folder that a group can write. Raises ConfigError with the first file, link or folder on the path that others
    can change.
    """
    try:
        untrusted = find_untrusted(path, trusted_users(trusted_user), group_above=group_above, inside=inside)
    except OSError as error:
        hint = "it is a dangling link" if path.is_symlink() and error.errno == errno.ENOENT else ""
        raise ConfigError(f"{description}: cannot be read: {error.strerror}", where=str(path), hint=hint) from error
    if not untrusted:
        return
    step, status, writer = untrusted
    hint = f"; {alternative}" if alternative and not group_above and status.st_gid in _groups() else ""
    if writer:
        problem = f"can be written by {writer} (expected only you and root)"
        hint = f"chmod {'o-w' if status.st_mode & stat.S_IWOTH else 'g-w'} {step}{hint}"
    else:
        user = user_name(status.st_uid)
        problem = f"belongs to user {user} (expected you or root)"
        hint = f"chown it, or use a copy of your own where you trust {user}: cp -r {path} COPY{hint}"
    raise _untrusted_error(path, description, step, problem, hint)


def require_private(path: Path, description: str) -> None:
    """Refuse a file that others than this user and root could read, change or replace. Raises ConfigError."""
    require_trusted(path, description)
    if path.stat().st_mode & 0o077:
        hint = f"chmod 600 {path}"
        raise ConfigError(f"{description}: others may read it (expected mode 0600)", where=str(path), hint=hint)


def _untrusted_error(path: Path, description: str, component: Path, problem: str, hint: str) -> ConfigError:
    which = (
        description
        if component == path.absolute()
        else f"{description} {path}: a {'link' if component.is_symlink() else 'folder'} on its path"
    )
    return ConfigError(f"{which} {problem}: its content is executed as you", where=str(component), hint=hint)


def _path_components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each folder and link on a path, then the file, with its own status (lstat). Raises OSError."""
    folder, remaining, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield folder, folder.lstat()
    while remaining:
        part = remaining.pop()
        if part == "..":
            folder = folder.parent
            continue
        status = (folder / part).lstat()
        yield folder / part, status
        if not stat.S_ISLNK(status.st_mode):
            folder = folder / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (folder / part).readlink()
        folder = Path("/") if target.is_absolute() else folder
        remaining += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def other_writers(status: os.stat_result, *, allow_group: bool) -> str:
    """Return the others that may write a file, by its mode: "everybody", a group, or ""."""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
        return "" if allow_group and status.st_gid in _groups() else f"group {_group(status.st_gid)}"
    return ""


@lru_cache(maxsize=64)
def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a group is root's or a user's private group: their primary one, of their name, without others."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}


def trusted_users(account_name: str = "") -> set[int]:
    """Return the uids of this user and of root, also as a container shows it, and of a system account."""
    users = {os.geteuid(), 0}
    if account_name and (account := _account(account_name)) is not None:
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
    """Return whether this process is in a container that shows root of the host as _OVERFLOW_UID."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return False
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return bool(ranges) and not any(first <= _OVERFLOW_UID < first + count for first, count in ranges)


def _groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def user_name(uid: int) -> str:
    """Return a user's name, or the uid if it has none, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
