"""Record the git state of a workdir: its commit, and a patch of changed and untracked files. Optional for a run.

Remotes are not recorded: their URLs may contain passwords. Nothing is written to the repository, and no hook of it is
run.
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

PATCH_MAX_BYTES = 16 << 20
_PATCH_FILE_MAX_BYTES = 4 << 20
_DIGEST_MAX_BYTES = 2 << 30  # of all files that are not in the patch
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
    """The git state of a workdir.

    commit: "" before the first. describe: as `git describe`. subdir: the workdir, relative to the repository's root.
    dirty: whether files are changed or untracked. patch: digest of dirty.patch, "" without one. left_out: changed or
    untracked files that are not in the patch: too large, secret, or excluded by `.pitignore`; their digest is "" for
    the last two, and beyond the limit on digests. problem: why something is missing.
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
    """Return the git state of a workdir; write the changed and untracked files of its repository to `patch`.

    without: folders whose untracked files are ignored. Without git, or after its failure, `problem` is set instead.
    """
    try:
        return _read_state(workdir, patch, without)
    except ToolMissing:
        return GitState(problem="git is not installed")
    except PitError as error:
        return GitState(problem=f"git failed: {error.message}")
    except OSError as error:
        return GitState(problem=f"cannot read git's files: {error.strerror}")


def git_describe(path: Path) -> str:
    """Return `git describe` of a folder, such as `v1.2-3-g9f3c2a1-dirty`; "" outside a repository."""
    try:
        done = _run_git(path, "describe", "--always", "--tags", "--dirty")
    except PitError:
        return ""
    return done.stdout.strip() if not done.code else ""


def _read_state(workdir: Path, patch: Path, without: Collection[Path]) -> GitState:
    location = _run_git(workdir, "rev-parse", "--show-toplevel", "--show-prefix", "--git-path", "index")
    if location.code:
        return GitState(problem=_git_error(location))
    top, inner, index = location.stdout.split("\n")[:3]
    done = _run_git(Path(top), *_STATUS)
    if done.code:
        return GitState(problem=_git_error(done))
    lines = done.stdout.split("\0")
    branch_info = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit = branch_info.get("branch.oid", "").replace("(initial)", "")
    described = _run_git(Path(top), "describe", "--always", "--tags").stdout.strip() if commit else ""
    git = GitState(
        commit=commit, describe=described, branch=branch_info.get("branch.head", ""), subdir=inner.rstrip("/")
    )
    changed = [line.split(" ", 8)[8] for line in lines if line.startswith("1 ")]
    changed += [line.split(" ", 10)[10] for line in lines if line.startswith("u ")]
    untracked = [
        line[2:] for line in lines if line.startswith("? ") and not _is_in_skipped_dir(Path(top), line[2:], without)
    ]
    if not changed and not untracked:
        return git
    excluded = _excluded_names(Path(top), workdir, [*changed, *untracked])
    return _write_patch(git, Path(top), workdir / index, patch, changed, untracked, excluded)


def _write_patch(
    git: GitState,
    top: Path,
    index: Path,
    patch: Path,
    changed: Sequence[str],
    untracked: Sequence[str],
    excluded: set[str],
) -> GitState:
    large = _large_names(top, [name for name in (*changed, *untracked) if name not in excluded])
    left_out = large | excluded
    added = [name for name in untracked if name not in left_out]
    changed_but_left_out = [name for name in changed if name in left_out]
    # No digest of a secret: a short secret could be guessed from it.
    left_out_entries = (
        *_file_entries(top, large),
        *(FileEntry(path=_escape_name(name), bytes=0, digest="") for name in sorted(excluded)),
    )
    git = msgspec.structs.replace(git, dirty=True, left_out=left_out_entries)
    # A copy of the index, because untracked files are added to it.
    index_copy = patch.with_name(f".{patch.name}.index")
    names_file = patch.with_name(f".{patch.name}.names")
    try:
        if index.exists():
            shutil.copy2(index, index_copy)  # with its mtime, by which git detects files to read again
        env = {"GIT_INDEX_FILE": str(index_copy.absolute())}
        names_file.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in added))
        if added:
            names = f"--pathspec-from-file={names_file.absolute()}"
            done = _run_git(top, "--literal-pathspecs", "add", "--intent-to-add", names, "--pathspec-file-nul", env=env)
            if done.code:
                return msgspec.structs.replace(git, problem=f"untracked files are in no patch: {_git_error(done)}")
        base = git.commit or _run_git(top, "hash-object", "-t", "tree", "/dev/null").stdout.strip()
        excluding = [f":(top,exclude,literal){name}" for name in changed_but_left_out]
        descriptor = os.open(patch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            done = _run_git(top, *_DIFF, base, "--", ".", *excluding, env=env, stdout=out)
    finally:
        for path in (index_copy, names_file, index_copy.with_name(f"{index_copy.name}.lock")):
            path.unlink(missing_ok=True)
    size, text = digest.digest_file(patch)
    if done.code or size > PATCH_MAX_BYTES:
        patch.unlink()
        problem = _git_error(done) if done.code else f"patch too large: {size} bytes (at most {PATCH_MAX_BYTES})"
        return msgspec.structs.replace(git, problem=problem)
    return msgspec.structs.replace(git, patch=text, patch_bytes=size)


def _excluded_names(top: Path, workdir: Path, names: Sequence[str]) -> set[str]:
    """Return the names that are excluded from the patch: secrets, and those in `.pitignore`."""
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
    """Return the files and whole folders that git ignores, relative to the workdir; None if git fails."""
    args = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
    try:
        done = _run_git(workdir.resolve(), *args)
    except PitError:
        return None
    return None if done.code else [name.rstrip("/") for name in done.stdout.split("\0") if name]


def _large_names(top: Path, names: Sequence[str]) -> set[str]:
    """Return the names that do not fit into the patch: large files, files beyond its limit, nested repositories."""
    large, total = set(), 0
    for name in names:
        try:
            status = (top / name).lstat()
        except OSError:  # removed, which the patch contains; or its name is not UTF-8
            if "\ufffd" in name:
                large.add(name)
            continue
        if status.st_size > _PATCH_FILE_MAX_BYTES or total + status.st_size > PATCH_MAX_BYTES or name.endswith("/"):
            large.add(name)
        else:
            total += status.st_size
    return large


def _file_entries(top: Path, names: Collection[str]) -> tuple[FileEntry, ...]:
    entries, remaining_bytes = [], _DIGEST_MAX_BYTES
    sizes = {name: _size(top / name) for name in sorted(names)}
    total = sum(sizes.values())
    with progress_bar("digests", total, unit="bytes", quiet=total < _PROGRESS_BAR_BYTES) as advance:
        for name, size in sizes.items():
            text = ""
            if 0 < size <= remaining_bytes:
                with contextlib.suppress(OSError):
                    _, text = digest.digest_file(top / name, advance)
                    remaining_bytes -= size
            entries.append(FileEntry(path=_escape_name(name), bytes=size, digest=text))
    return tuple(entries)


def _size(path: Path) -> int:
    """Return a file's size in bytes; 0 if missing or not a regular file."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _is_in_skipped_dir(top: Path, name: str, without: Collection[Path]) -> bool:
    parents = [top / parent for parent in Path(name).parents if parent.name]
    return any(folder in without or workdir_walk.is_skipped(folder) for folder in parents)


def _run_git(
    folder: Path, *args: str, env: Mapping[str, str] = _ENV, stdout: BinaryIO | None = None
) -> subprocesses.Completed:
    # Within a git hook, GIT_ variables name another repository.
    git_variables = [name for name in os.environ if name.startswith("GIT_")]
    argv = ["git", *_SAFE_CONFIG, "-C", str(folder), *args]
    return subprocesses.run(argv, timeout_s=_TIMEOUT_S, env={**_ENV, **env}, unset=git_variables, stdout=stdout)


def _git_error(done: subprocesses.Completed) -> str:
    message = next((line for line in done.stderr.splitlines() if line.startswith(("fatal:", "error:"))), "")
    if "not a git repository" in message:
        return "the workdir is in no repository"
    if "dubious ownership" in message:
        return "the repository belongs to another user; to allow it: git config --global --add safe.directory PATH"
    return message.partition(": ")[2] or f"git exited with code {done.code}"


def _escape_name(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
