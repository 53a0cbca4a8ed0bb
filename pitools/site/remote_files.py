"""Files of a site that may share none with this machine: sent, read and removed over its `connection`.

What arrives is whole or absent: it is built there under a name of its own and then renamed. All of it is done by the
far side's `sh`, `tar` and coreutils; paths are words, never parts of a script.
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
_MIN_BYTES_PER_S = 256 << 10  # bytes a second; who is slower than that has stopped
_EXIT_MISSING, _EXIT_OCCUPIED = 66, 67
_FULL = re.compile(r"No space left|[Dd]isk quota exceeded|Wrote only \d+ of")
_MAX_LOGIN_OUTPUT = 1 << 20  # what a login may say before the answer
_C_LOCALE = {"LC_ALL": "C"}  # why a tool failed is to be understood here

# Each is one line: csh, as a login shell, takes no other. HUP and PIPE: what was begun is finished or undone there,
# whether or not anyone here still listens.
_PUT_SCRIPT = (
    "trap '' HUP PIPE; p=${1%/*}; b=${1##*/}; t=$p/.$b.$2.part; "
    '[ -e "$1" ] || [ -L "$1" ] && exit 67; mkdir -p -- "$p" || exit 1; '
    '[ -L "$p" ] && { echo "$p is a link, not a folder" >&2; exit 1; }; '
    # What a killed machine left of an earlier try.
    'for o in "$p/.$b."*.part; do [ -d "$o" ] && [ -n "$(find "$o" -maxdepth 0 -mmin +60)" ] && rm -rf -- "$o"; done; '
    'mkdir ${3:+-m "$3"} -- "$t" || exit 1; '
    # tar is content with a stream that ends between two files: only the last of them says that it came whole.
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
    # What `write_atomic` is just writing gets another name before tar comes to it.
    "x='[0-9a-f]'; h=\".*.$x$x$x$x$x$x$x$x\"; "
    'listed() { find . \'(\' -name "$h" "$@" \')\' -prune -o -type f -printf "$f"; }; '
    "f='%s\\n'; s=$(listed \"$@\" | awk '{ s += $1 } END { printf \"%.0f\", s }'); "
    '[ "$s" -le "$n" ] || { echo "it holds $s bytes" >&2; exit 1; }; '
    # 1: a file changed while it was read, as a log does; its length is still what its header says.
    "f='%P\\0'; listed \"$@\" | tar -cf - --null --no-recursion -T -; r=$?; [ $r = 1 ] && r=0; exit $r"
)
# A rename to a name that a later call finds again, where this one is cut off.
_REMOVE_SCRIPT = (
    'trap "" HUP PIPE; r=0; for p; do g="${p%/*}/.${p##*/}.gone"; rm -rf -- "$g"; '
    '[ -e "$p" ] || [ -L "$p" ] || continue; mv -T -- "$p" "$g" && rm -rf -- "$g" || r=1; done; exit $r'
)


class PutResult(NamedTuple):
    """What it took to send something. created: False where it was there already, and was left as it was."""

    created: bool
    bytes: int
    wall_s: float


def run_shell(
    site: Site,
    script: str,
    *words: str,
    env: Mapping[str, str] = _C_LOCALE,
    stdin: str | BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    timeout_s: float = 0.0,
) -> subprocesses.Completed:
    """Run a one-line shell script where the site is, with words as $1, $2, …, and return its answer, whatever it is.

    timeout_s: if more than the transport's own. Raises Unreachable where there is no answer, or only half of one.
    """
    transport = client(site).transport
    transport = msgspec.structs.replace(transport, timeout_s=max(transport.timeout_s, timeout_s))
    done = run_command(transport, ["sh", "-c", script, "pit", *words], env=env, stdin=stdin, stdout=stdout)
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
    """Send a folder, or entries of one, and let it appear at `target`, whole; what is there already stays.

    mode: permissions of the folder, by default as the umask there has it.

    Raises DataError for a link or device in a folder, and for more than `limit` bytes; NoSpace, ClusterError, or
    Unreachable, after which it is there or not: the same call again makes sure.
    """
    require_remote_path(target)
    entries = list(tar_stream.entries_of_dir(tree)) if isinstance(tree, Path) else list(tree)
    size = _require_fits(entries, limit, target)
    token = secrets.token_hex(8)
    whole = tar_stream.TarEntry(name=token, data=b"")
    began = time.monotonic()
    pipe = tar_stream.TarPipe(lambda out: tar_stream.write_tar([*entries, whole], out), is_source=True)
    with pipe as source:
        access = f"{mode:o}" if mode is not None else ""
        done = run_shell(site, _PUT_SCRIPT, target, token, access, stdin=source, timeout_s=60 + size / _MIN_BYTES_PER_S)
    if done.code == _EXIT_OCCUPIED:
        return PutResult(created=False, bytes=0, wall_s=time.monotonic() - began)
    if error := pipe.failed():  # that the far side complains of half a stream is only its consequence
        raise error
    _checked(site, done, target)
    return PutResult(created=True, bytes=size, wall_s=time.monotonic() - began)


def _require_fits(entries: Iterable[tar_stream.TarEntry], limit: int, to: str) -> int:
    sizes = {entry.name: entry.path.lstat().st_size for entry in entries if entry.path is not None}
    total = sum(sizes.values()) + sum(len(entry.data or b"") for entry in entries)
    if total > limit:
        largest = max(sizes, key=sizes.__getitem__, default="")
        what = f"{format_size(total)} are more than the {format_size(limit)} that are sent"
        raise DataError(what, where=to, hint=f"the largest is {largest}, {format_size(sizes.get(largest, 0))}")
    return total


def get_tree(site: Site, folder: str, target: Path, *, without: Sequence[str] = (), limit: int = 256 * MIB) -> bool:
    """Bring the files of a folder here, as a new folder `target` or in its place; False where there is none.

    without: names of folders that stay there. Links stay too. Raises ClusterError for more than `limit` bytes,
    DataError for an answer that is no plain tar; `target` is then as it was.
    """
    require_remote_path(folder)
    names = [word for name in without for word in ("-o", "-path", f"./{name}")]
    building = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        building.mkdir(parents=True)
        pipe = tar_stream.TarPipe(lambda stream: _unpack_answer(site, stream, building, limit), is_source=False)
        with pipe as sink:
            done = run_shell(
                site, _GET_SCRIPT, folder, str(limit), *names, stdout=sink, timeout_s=60 + limit / _MIN_BYTES_PER_S
            )
        if done.code == _EXIT_MISSING:
            return False
        _checked(site, done, folder)
        if error := pipe.failed():
            raise type(error)(error.message, where=f"{_describe_host(site)}{folder}", hint=error.hint)
        if pipe.result() is None:
            raise Unreachable("half an answer", where=f"{_describe_host(site)}{folder}", hint="try again")
        _replace(building, target)
    except OSError as error:
        raise from_os_error(error, target) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def _unpack_answer(site: Site, stream: BinaryIO, to: Path, limit: int) -> int:
    if site.connection.kind == "ssh":
        said = b""
        while not said.endswith(LOGIN_OUTPUT_END.encode()):
            said += (byte := stream.read(1))
            if not byte or len(said) > _MAX_LOGIN_OUTPUT:
                raise DataError("no answer")
    return tar_stream.unpack_tar(stream, to, limit=limit)


def _replace(new: Path, to: Path) -> None:
    old = to.with_name(f"{new.name}.old")
    if to.exists():
        to.rename(old)
    new.rename(to)
    shutil.rmtree(old, ignore_errors=True)


def write_file(site: Site, file: str, data: bytes) -> None:
    """Write a file in a folder that is there: its reader sees the old content or the new. Raises as `put`."""
    require_remote_path(file)
    with tar_stream.TarPipe(lambda out: out.write(data), is_source=True) as source:
        done = run_shell(site, _WRITE_SCRIPT, file, secrets.token_hex(8), str(len(data)), stdin=source)
    _checked(site, done, file)


def read_file(site: Site, file: str, *, limit: int = MIB) -> bytes | None:
    """A file's content; None where there is none. Raises ClusterError for a link, or more bytes than `limit`."""
    require_remote_path(file)
    done = run_shell(site, _READ_SCRIPT, file, str(limit))
    if done.code == _EXIT_MISSING:
        return None
    _checked(site, done, file)
    try:
        return base64.b64decode("".join(done.stdout.split()), validate=True)
    except binascii.Error as error:
        raise DataError("half an answer, or none", where=f"{_describe_host(site)}{file}") from error


def existing(site: Site, paths: Iterable[str]) -> set[str]:
    """Those that are there and are no links, of any number of paths, in one call."""
    asked = [require_remote_path(one) for one in paths]
    if not asked:
        return set()
    script = 'while IFS= read -r f; do [ -e "$f" ] && [ ! -L "$f" ] && echo y || echo n; done; echo end'
    done = run_shell(site, script, stdin="".join(f"{one}\n" for one in asked))
    _checked(site, done, asked[0])
    said = done.stdout.split()
    if len(said) != len(asked) + 1 or not set(said) <= {"y", "n", "end"}:
        raise Unreachable("half an answer", where=_describe_host(site), hint="try again")
    return {one for one, word in zip(asked, said, strict=False) if word == "y"}


def remove_paths(site: Site, *paths: str) -> None:
    """Remove files, or folders with all that is in them; of a link only the link. What is not there is no error.

    Each is whole or gone for whoever looks.
    """
    for one in paths:
        if require_remote_path(one).count("/") < 2:
            raise ConfigError(f"{one} is not removed", hint="name something inside of a folder")
    done = run_shell(site, _REMOVE_SCRIPT, *paths, timeout_s=120)
    _checked(site, done, paths[0] if paths else "")


def require_remote_path(text: str) -> str:
    """The path, if it may be used there: absolute, one printable line, without `..`. Raises ConfigError."""
    parts = text.split("/")
    if not text.startswith("/") or not text.isprintable() or ".." in parts or not parts[-1]:
        what = f"{text!r} cannot be a path of a site that is reached over the network"
        raise ConfigError(what, hint="write it in full, as one printable line without '..' and without '/' at its end")
    return text


def _checked(site: Site, done: subprocesses.Completed, where: str) -> None:
    if done.code:
        raise transfer_error(site, done, where)


def transfer_error(site: Site, done: subprocesses.Completed, where: str) -> PitError:
    """The error that a failed script stands for."""
    said, place = error_text(done.stderr), f"{_describe_host(site)}{where}"
    if _FULL.search(said):
        return NoSpace("no space left there", where=place, hint="free space there, or choose another site")
    if done.code == NOT_FOUND:
        return ClusterError(
            f"a tool is missing there: {said}", where=place, hint="it needs sh, tar, find and coreutils"
        )
    return ClusterError(said or f"exit code {done.code} and no reason given", where=place)


def _describe_host(site: Site) -> str:
    return f"{site.connection.host}:" if site.connection.kind == "ssh" else ""
