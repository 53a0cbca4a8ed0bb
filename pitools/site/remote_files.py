"""Send, read and remove files of a site over its `connection`.

Files and folders are built under a temporary name and renamed, so each is complete or absent. The site needs only
`sh`, `tar` and coreutils; paths are arguments, never parts of a script.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, ConfigError, DataError, NoSpace, PitError, Unreachable
from pitools.core.fs import from_os_error
from pitools.core.units import format_size
from pitools.site import tar_stream
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.errors import NOT_FOUND, SSH_FAILED, error_for, error_text
from pitools.slurm.transport import LOGIN_OUTPUT_END, run_command

MIB = 1 << 20
_MIN_BYTES_PER_S = 256 << 10  # slower transfers count as stopped
_EXIT_MISSING, _EXIT_OCCUPIED = 66, 67
_FULL = re.compile(r"No space left|[Dd]isk quota exceeded|Wrote only \d+ of")
_MAX_LOGIN_OUTPUT = 1 << 20  # bytes of a login's text before the output
_C_LOCALE = {"LC_ALL": "C"}  # error messages are matched in English

# Each is one line, because csh as login shell accepts no other. HUP and PIPE are ignored, so that a script finishes or
# cleans up after a lost connection.
_PUT_SCRIPT = (
    "trap '' HUP PIPE; p=${1%/*}; b=${1##*/}; t=$p/.$b.$2.part; "
    '[ -e "$1" ] || [ -L "$1" ] && exit 67; mkdir -p -- "$p" || exit 1; '
    '[ -L "$p" ] && { echo "$p is a link, not a folder" >&2; exit 1; }; '
    # Remainders of earlier tries that were killed.
    'for o in "$p/.$b."*.part; do [ -d "$o" ] && [ -n "$(find "$o" -maxdepth 0 -mmin +60)" ] && rm -rf -- "$o"; done; '
    'mkdir ${3:+-m "$3"} -- "$t" || exit 1; '
    # tar accepts a stream that ends between two files: only the last file proves that the stream is complete.
    'if tar -xof - -C "$t" && [ -e "$t/$2" ] && rm -f -- "$t/$2" && mv -T -- "$t" "$1"; then exit 0; fi; '
    'rm -rf -- "$t"; [ -d "$1" ] && exit 67; exit 1'
)
_WRITE_SCRIPT = (
    "trap '' HUP PIPE; t=${1%/*}/.${1##*/}.$2.part; "
    'if cat > "$t" && [ "$(wc -c < "$t")" -eq "$3" ] && mv -fT -- "$t" "$1"; then exit 0; fi; rm -f -- "$t"; exit 1'
)
_READ_SCRIPT = (
    '[ -e "$1" ] || [ -L "$1" ] || exit 66; [ -f "$1" ] && [ ! -L "$1" ] || { echo "not a file" >&2; exit 1; }; '
    's=$(wc -c < "$1") || exit 1; [ "$s" -le "$2" ] || { echo "it holds $s bytes" >&2; exit 1; }; base64 < "$1"'
)
_GET_SCRIPT = (
    'cd -- "$1" 2>/dev/null || exit 66; [ -L "$1" ] && { echo "it is a link" >&2; exit 1; }; n=$2; shift 2; '
    # Omit temporary files of `write_atomic`: they are renamed before tar reads them.
    "x='[0-9a-f]'; h=\".*.$x$x$x$x$x$x$x$x\"; "
    'listed() { find . \'(\' -name "$h" "$@" \')\' -prune -o -type f -printf "$f"; }; '
    "f='%s\\n'; s=$(listed \"$@\" | awk '{ s += $1 } END { printf \"%.0f\", s }'); "
    '[ "$s" -le "$n" ] || { echo "it holds $s bytes" >&2; exit 1; }; '
    # 1: a file changed during the read, such as a log; its length still matches its header.
    "f='%P\\0'; listed \"$@\" | tar -cf - --null --no-recursion -T -; r=$?; [ $r = 1 ] && r=0; exit $r"
)
# Renames to a fixed name, so that a later call removes the remainder of an interrupted one.
_REMOVE_SCRIPT = (
    'trap "" HUP PIPE; r=0; for p; do g="${p%/*}/.${p##*/}.gone"; rm -rf -- "$g"; '
    '[ -e "$p" ] || [ -L "$p" ] || continue; mv -T -- "$p" "$g" && rm -rf -- "$g" || r=1; done; exit $r'
)


class PutResult(NamedTuple):
    """Result of a transfer. created: False if the target existed, and was not changed."""

    created: bool
    bytes: int
    wall_s: float


def run_shell(
    site: Site,
    script: str,
    *arguments: str,
    env: Mapping[str, str] = _C_LOCALE,
    stdin: str | BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    timeout_s: float = 0.0,
) -> subprocesses.Completed:
    """Run a one-line shell script at the site, with arguments as $1, $2, …; a failed script is returned, not raised.

    timeout_s: replaces the transport's if longer. Raises Unreachable if ssh fails or times out.
    """
    transport = client(site).transport
    transport = msgspec.structs.replace(transport, timeout_s=max(transport.timeout_s, timeout_s))
    done = run_command(transport, ["sh", "-c", script, "pit", *arguments], env=env, stdin=stdin, stdout=stdout)
    if transport.host and done.code == SSH_FAILED:
        raise error_for("sh", transport.host, done.code, done.stderr)
    return done


def put_tree(
    site: Site,
    tree: Path | Sequence[tar_stream.TarEntry],
    target: str,
    *,
    limit: int = 256 * MIB,
    mode: int | None = None,
) -> PutResult:
    """Send a folder, or entries of one, to `target`, atomically; an existing target is not changed.

    mode: permissions of the folder; by default from the site's umask. Raises DataError for a link or device in a folder
    and for more than `limit` bytes; NoSpace; ClusterError; Unreachable, after which the target may exist: call again.
    """
    require_remote_path(target)
    entries = list(tar_stream.entries_of_dir(tree)) if isinstance(tree, Path) else list(tree)
    size = _require_fits(entries, limit, target)
    token = secrets.token_hex(8)
    end_marker = tar_stream.TarEntry(name=token, data=b"")
    began = time.monotonic()
    pipe = tar_stream.TarPipe(lambda out: tar_stream.write_tar([*entries, end_marker], out), is_source=True)
    with pipe as source:
        access = f"{mode:o}" if mode is not None else ""
        done = run_shell(site, _PUT_SCRIPT, target, token, access, stdin=source, timeout_s=60 + size / _MIN_BYTES_PER_S)
    if done.code == _EXIT_OCCUPIED:
        return PutResult(created=False, bytes=0, wall_s=time.monotonic() - began)
    if error := pipe.failed():  # the site's error about a truncated stream is only a consequence
        raise error
    _require_success(site, done, target)
    return PutResult(created=True, bytes=size, wall_s=time.monotonic() - began)


def _require_fits(entries: Iterable[tar_stream.TarEntry], limit: int, to: str) -> int:
    sizes = {entry.name: entry.path.lstat().st_size for entry in entries if entry.path is not None}
    total = sum(sizes.values()) + sum(len(entry.data or b"") for entry in entries)
    if total > limit:
        largest = max(sizes, key=sizes.__getitem__, default="")
        problem = f"{format_size(total)} (expected at most {format_size(limit)})"
        raise DataError(problem, where=to, hint=f"the largest is {largest}, {format_size(sizes.get(largest, 0))}")
    return total


def get_tree(site: Site, folder: str, target: Path, *, without: Sequence[str] = (), limit: int = 256 * MIB) -> bool:
    """Copy a folder of the site to `target`, which is created or replaced. Returns False if there is no such folder.

    without: names of folders to omit; links are omitted too. Raises ClusterError for more than `limit` bytes and
    DataError for an invalid tar; `target` is then unchanged.
    """
    require_remote_path(folder)
    excluded = [argument for name in without for argument in ("-o", "-path", f"./{name}")]
    building = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        building.mkdir(parents=True)
        pipe = tar_stream.TarPipe(lambda stream: _unpack_answer(site, stream, building, limit), is_source=False)
        with pipe as sink:
            done = run_shell(
                site, _GET_SCRIPT, folder, str(limit), *excluded, stdout=sink, timeout_s=60 + limit / _MIN_BYTES_PER_S
            )
        if done.code == _EXIT_MISSING:
            return False
        _require_success(site, done, folder)
        if error := pipe.failed():
            raise type(error)(error.message, where=f"{_describe_host(site)}{folder}", hint=error.hint)
        if pipe.result() is None:
            raise Unreachable("truncated output", where=f"{_describe_host(site)}{folder}", hint="try again")
        _replace(building, target)
    except OSError as error:
        raise from_os_error(error, target) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def _unpack_answer(site: Site, stream: BinaryIO, to: Path, limit: int) -> int:
    if site.connection.kind == "ssh":
        login_text = b""
        while not login_text.endswith(LOGIN_OUTPUT_END.encode()):
            login_text += (byte := stream.read(1))
            if not byte or len(login_text) > _MAX_LOGIN_OUTPUT:
                raise DataError("no output")
    return tar_stream.unpack_tar(stream, to, limit=limit)


def _replace(new: Path, to: Path) -> None:
    old = to.with_name(f"{new.name}.old")
    if to.exists():
        to.rename(old)
    new.rename(to)
    shutil.rmtree(old, ignore_errors=True)


def write_file(site: Site, file: str, data: bytes) -> None:
    """Write a file atomically, in an existing folder. Raises as `put_tree`."""
    require_remote_path(file)
    with tar_stream.TarPipe(lambda out: out.write(data), is_source=True) as source:
        done = run_shell(site, _WRITE_SCRIPT, file, secrets.token_hex(8), str(len(data)), stdin=source)
    _require_success(site, done, file)


def read_file(site: Site, file: str, *, limit: int = MIB) -> bytes | None:
    """Return a file's content; None if missing. Raises ClusterError for a link, or more bytes than `limit`."""
    require_remote_path(file)
    done = run_shell(site, _READ_SCRIPT, file, str(limit))
    if done.code == _EXIT_MISSING:
        return None
    _require_success(site, done, file)
    try:
        return base64.b64decode("".join(done.stdout.split()), validate=True)
    except binascii.Error as error:
        raise DataError("truncated or missing output", where=f"{_describe_host(site)}{file}") from error


def existing(site: Site, paths: Iterable[str]) -> set[str]:
    """Return the paths that exist and are no links, in one call."""
    queried = [require_remote_path(path) for path in paths]
    if not queried:
        return set()
    script = 'while IFS= read -r f; do [ -e "$f" ] && [ ! -L "$f" ] && echo y || echo n; done; echo end'
    done = run_shell(site, script, stdin="".join(f"{path}\n" for path in queried))
    _require_success(site, done, queried[0])
    flags = done.stdout.split()
    if len(flags) != len(queried) + 1 or not set(flags) <= {"y", "n", "end"}:
        raise Unreachable("truncated output", where=_describe_host(site), hint="try again")
    return {path for path, flag in zip(queried, flags, strict=False) if flag == "y"}


def remove_paths(site: Site, *paths: str) -> None:
    """Remove files, or folders with their content; of a link only the link. Missing paths are ignored.

    Each path disappears atomically.
    """
    for path in paths:
        if require_remote_path(path).count("/") < 2:
            raise ConfigError(f"{path} is not removed", hint="give a path inside of a folder")
    done = run_shell(site, _REMOVE_SCRIPT, *paths, timeout_s=120)
    _require_success(site, done, paths[0] if paths else "")


def require_remote_path(text: str) -> str:
    """Return the path, if it is absolute, one printable line, and without `..`. Raises ConfigError."""
    parts = text.split("/")
    if not text.startswith("/") or not text.isprintable() or ".." in parts or not parts[-1]:
        problem = f"{text!r} is not a valid remote path"
        raise ConfigError(problem, hint="give an absolute path, one printable line without '..' and final '/'")
    return text


def _require_success(site: Site, done: subprocesses.Completed, where: str) -> None:
    if done.code:
        raise transfer_error(site, done, where)


def transfer_error(site: Site, done: subprocesses.Completed, where: str) -> PitError:
    """Return the error for a failed script."""
    message, location = error_text(done.stderr), f"{_describe_host(site)}{where}"
    if _FULL.search(message):
        return NoSpace("no space left", where=location, hint="free space there, or choose another site")
    if done.code == NOT_FOUND:
        return ClusterError(f"missing tool: {message}", where=location, hint="it needs sh, tar, find and coreutils")
    return ClusterError(message or f"exited with code {done.code} and no message", where=location)


def _describe_host(site: Site) -> str:
    return f"{site.connection.host}:" if site.connection.kind == "ssh" else ""
