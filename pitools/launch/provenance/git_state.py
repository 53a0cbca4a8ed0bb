"""What git knows of a workdir: its commit, and as one patch what was changed or untracked. Nothing of it is needed.

Remotes are not asked for: their addresses may hold passwords. Nothing is written to the repository, and none of its
hooks is run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import PitError, ToolMissing
from pitools.core.progress import progress_bar
from pitools.launch.provenance import workdir_walk
from pitools.launch.provenance.copy_rules import CopyRules, is_secret
from pitools.store import digest
from pitools.store.manifest import FileEntry

PATCH_MAX_BYTES = 16 << 20  # of the patch
_PATCH_FILE_MAX_BYTES = 4 << 20  # of one file in it
_DIGEST_MAX_BYTES = 2 << 30  # of all that is only named
_PROGRESS_BAR_BYTES = 256 << 20
_TIMEOUT_S = 10.0
_SAFE_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=true")
_ENV = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--no-renames", "--ahead-behind")
_DIFF = (
    "diff",
    "--binary",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    """A workdir's place in its repository.

    commit: "" where there is none yet. describe: by the nearest tag. subdir: the workdir, seen from the repository's
    root. dirty: whether the commit is not all. patch: digest of dirty.patch, "" where there is none. left_out: files
    that were changed or untracked and are no part of the patch: too large, a secret, or left out by `.pitignore`;
    digest is "" for the last two, and where they were too large to read.
    problem: why any of this is not known.
    """

    commit: str = ""
    describe: str = ""
    branch: str = ""
    subdir: str = ""
    dirty: bool = False
    patch: str = ""
    patch_bytes: int = 0
    left_out: tuple[FileEntry, ...] = ()
    problem: str = ""


def read_git_state(workdir: Path, patch: Path, *, without: Collection[Path] = ()) -> GitState:
    """What git knows of a workdir; what was changed or untracked in its repository is written to `patch`.

    without: folders whose untracked files are none of it. Never raises for want of git: `said` then tells why.
    """
    try:
        return _read_state(workdir, patch, without)
    except ToolMissing:
        return GitState(problem="there is no git here")
    except PitError as error:
        return GitState(problem=f"git gave no answer: {error.message}")
    except OSError as error:
        return GitState(problem=f"git's files cannot be read: {error.strerror}")


def git_describe(path: Path) -> str:
    """The state of the repository that a folder is in, such as `v1.2-3-g9f3c2a1-dirty`; "" where there is none."""
    try:
        done = _git(path, "describe", "--always", "--tags", "--dirty")
    except PitError:
        return ""
    return done.stdout.strip() if not done.code else ""


def _read_state(workdir: Path, patch: Path, without: Collection[Path]) -> GitState:
    place = _git(workdir, "rev-parse", "--show-toplevel", "--show-prefix", "--git-path", "index")
    if place.code:
        return GitState(problem=_git_error(place))
    top, inner, index = place.stdout.split("\n")[:3]
    done = _git(Path(top), *_STATUS)
    if done.code:
        return GitState(problem=_git_error(done))
    lines = done.stdout.split("\0")
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit = about.get("branch.oid", "").replace("(initial)", "")
    described = _git(Path(top), "describe", "--always", "--tags").stdout.strip() if commit else ""
    git = GitState(commit=commit, describe=described, branch=about.get("branch.head", ""), subdir=inner.rstrip("/"))
    changed = [line.split(" ", 8)[8] for line in lines if line.startswith("1 ")]
    changed += [line.split(" ", 10)[10] for line in lines if line.startswith("u ")]
    untracked = [line[2:] for line in lines if line.startswith("? ") and not _left_out(Path(top), line[2:], without)]
    if not changed and not untracked:
        return git
    secret = _excluded_names(Path(top), workdir, [*changed, *untracked])
    return _write_patch(git, Path(top), workdir / index, patch, changed, untracked, secret)


def _write_patch(
    git: GitState,
    top: Path,
    index: Path,
    patch: Path,
    changed: Sequence[str],
    untracked: Sequence[str],
    secret: set[str],
) -> GitState:
    large = _too_large(top, [name for name in (*changed, *untracked) if name not in secret])
    outside = large | secret
    added = [name for name in untracked if name not in outside]
    excluded = [name for name in changed if name in outside]
    # No digest of a secret either: a short one could be guessed from it.
    named = (*_file_entries(top, large), *(FileEntry(path=_shown(name), bytes=0, digest="") for name in sorted(secret)))
    git = msgspec.structs.replace(git, dirty=True, left_out=named)
    # An index of our own, where untracked files are to be added: git's own is nobody's to write but its user's.
    mine = patch.with_name(f".{patch.name}.index")
    words = patch.with_name(f".{patch.name}.names")
    try:
        if index.exists():
            shutil.copy2(index, mine)  # with its time: by that git knows which files it has to read again
        env = {"GIT_INDEX_FILE": str(mine.absolute())}
        words.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in added))
        if added:
            names = f"--pathspec-from-file={words.absolute()}"
            done = _git(top, "--literal-pathspecs", "add", "--intent-to-add", names, "--pathspec-file-nul", env=env)
            if done.code:
                return msgspec.structs.replace(git, problem=f"untracked files are in no patch: {_git_error(done)}")
        since = git.commit or _git(top, "hash-object", "-t", "tree", "/dev/null").stdout.strip()
        but = [f":(top,exclude,literal){name}" for name in excluded]
        descriptor = os.open(patch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            done = _git(top, *_DIFF, since, "--", ".", *but, env=env, stdout=out)
    finally:
        for path in (mine, words, mine.with_name(f"{mine.name}.lock")):
            path.unlink(missing_ok=True)
    size, text = digest.digest_file(patch)
    if done.code or size > PATCH_MAX_BYTES:
        patch.unlink()
        problem = (
            _git_error(done)
            if done.code
            else f"the patch has {size} bytes, more than the {PATCH_MAX_BYTES} that are kept"
        )
        return msgspec.structs.replace(git, problem=problem)
    return msgspec.structs.replace(git, patch=text, patch_bytes=size)


def _excluded_names(top: Path, workdir: Path, names: Sequence[str]) -> set[str]:
    """Those that no copy of the workdir gets: secrets, and what its `.pitignore` names."""
    root = workdir.resolve()
    exclusions = CopyRules(root, ())
    return {
        name
        for name in names
        if (
            exclusions.exclusion_reason(top / name)
            if (top / name).is_relative_to(root)
            else is_secret(top / name, name)
        )
    }


def ignored_paths(workdir: Path) -> list[str] | None:
    """What git ignores in a workdir, as paths below it, folders whole; None where git gives no answer."""
    words = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
    try:
        done = _git(workdir.resolve(), *words)
    except PitError:
        return None
    return None if done.code else [name.rstrip("/") for name in done.stdout.split("\0") if name]


def _too_large(top: Path, names: Sequence[str]) -> set[str]:
    """Those that do not fit into the patch: large ones, the last ones, and repositories of their own."""
    large, total = set(), 0
    for name in names:
        try:
            found = (top / name).lstat()
        except OSError:  # it was removed, which is a change like another; or its name came through as no text
            if "\ufffd" in name:
                large.add(name)
            continue
        if found.st_size > _PATCH_FILE_MAX_BYTES or total + found.st_size > PATCH_MAX_BYTES or name.endswith("/"):
            large.add(name)
        else:
            total += found.st_size
    return large


def _file_entries(top: Path, names: Collection[str]) -> tuple[FileEntry, ...]:
    entries, left = [], _DIGEST_MAX_BYTES
    sizes = {name: _size(top / name) for name in sorted(names)}
    total = sum(sizes.values())
    with progress_bar("digests", total, unit="bytes", quiet=total < _PROGRESS_BAR_BYTES) as advance:
        for name, size in sizes.items():
            text = ""
            if 0 < size <= left:
                with contextlib.suppress(OSError):
                    _, text = digest.digest_file(top / name, advance)
                    left -= size
            entries.append(FileEntry(path=_shown(name), bytes=size, digest=text))
    return tuple(entries)


def _size(path: Path) -> int:
    """Bytes of a file; 0 for what is none."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _left_out(top: Path, name: str, without: Collection[Path]) -> bool:
    above = [top / parent for parent in Path(name).parents if parent.name]
    return any(one in without or workdir_walk.is_skipped(one) for one in above)


def _git(
    at: Path, *words: str, env: Mapping[str, str] = _ENV, stdout: BinaryIO | None = None
) -> subprocesses.Completed:
    # Inside one of git's own hooks its variables would lead to another repository.
    bent = [name for name in os.environ if name.startswith("GIT_")]
    argv = ["git", *_SAFE_CONFIG, "-C", str(at), *words]
    return subprocesses.run(argv, timeout_s=_TIMEOUT_S, env={**_ENV, **env}, unset=bent, stdout=stdout)


def _git_error(done: subprocesses.Completed) -> str:
    said = next((line for line in done.stderr.splitlines() if line.startswith(("fatal:", "error:"))), "")
    if "not a git repository" in said:
        return "the workdir is in no repository"
    if "dubious ownership" in said:
        return "git refuses: the repository is another user's (git config safe.directory)"
    return said.partition(": ")[2] or f"git ended with {done.code}"


def _shown(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
