"""Record the git state of a workdir: its commit, and a patch of changed and untracked files. Optional for a run.

Remotes are not recorded: their URLs may contain passwords. Nothing is written to the repository, and no hook of it is
run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import PitError, ToolMissing, Unreachable
from pitools.core.progress import progress_bar
from pitools.launch.provenance import workdir_walk
from pitools.launch.provenance.copy_rules import CopyRules, is_secret_file
from pitools.store import digest
from pitools.store.manifest import FileEntry

PATCH_MAX_BYTES = 16 << 20
_PATCH_FILE_MAX_BYTES = 4 << 20
_DIGEST_MAX_BYTES = 2 << 30  # of all files that are not in the patch
_PROGRESS_BAR_BYTES = 256 << 20
_TIMEOUT_S = 10.0
_SAFE_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=true")
_ENV = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--ahead-behind")
_ADD = ("--literal-pathspecs", "add", "--intent-to-add", "--ignore-errors")
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
    dirty: whether files are changed or untracked; false also if unknown, with a `problem`. patch: digest of
    dirty.patch, "" without one. left_out: changed or untracked files that are not in the patch: too large, secret,
    private, or excluded by `.pitignore`; their digest is "" for all but the first, and beyond the limit on digests.
    problem: why something is missing.
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

    without: folders whose untracked files are ignored. What cannot be read is left out, and `problem` says why.
    """
    git = GitState()
    try:
        for git in _read_states(workdir, patch, without):  # noqa: B007 (the last one before a failure)
            pass
    except (PitError, OSError) as error:
        return _with_problem(git, _error_text(error))
    return git


def _with_problem(git: GitState, problem: str) -> GitState:
    return msgspec.structs.replace(git, problem="; ".join(filter(None, (git.problem, problem))))


def _error_text(error: PitError | OSError) -> str:
    if isinstance(error, ToolMissing):
        return "git is not installed"
    return f"git failed: {error.message}" if isinstance(error, PitError) else f"git's files: {error.strerror}"


def git_describe(path: Path) -> str:
    """Return `git describe` of a folder, such as `v1.2-3-g9f3c2a1-dirty`; "" outside a repository."""
    try:
        done = _run_git(path, "describe", "--always", "--tags", "--dirty")
    except PitError:
        return ""
    return done.stdout.strip() if not done.code else ""


def _read_states(workdir: Path, patch: Path, without: Collection[Path]) -> Iterator[GitState]:
    """Yield the state as far as it is known, after each command of git. Raises PitError, OSError."""
    location = _run_git(workdir, "rev-parse", "--show-toplevel", "--show-prefix", "--git-path", "index")
    if location.code:
        yield GitState(problem=_git_error(location))
        return
    top, inner, index = location.stdout.split("\n")[:3]
    commit = _run_git(Path(top), "rev-parse", "--verify", "--quiet", "HEAD").stdout.strip()
    yield (git := GitState(commit=commit, subdir=inner.rstrip("/")))
    done, problem = _run_status(Path(top))
    if done.code:
        yield _with_problem(git, _git_error(done))
        return
    lines = done.stdout.split("\0")
    branch = next((line.split(" ", 2)[2] for line in lines if line.startswith("# branch.head ")), "")
    changed = [line.split(" ", 8)[8] for line in lines if line.startswith("1 ")]
    changed += [line.split(" ", 10)[10] for line in lines if line.startswith("u ")]
    untracked = [
        line[2:] for line in lines if line.startswith("? ") and not _is_in_skipped_dir(Path(top), line[2:], without)
    ]
    git = _with_problem(msgspec.structs.replace(git, branch=branch, dirty=bool(changed or untracked)), problem)
    yield git
    if git.dirty:
        excluded = _excluded_names(Path(top), workdir, changed, untracked)
        yield (git := _write_patch(git, Path(top), workdir / index, patch, changed, untracked, excluded))
    if commit:
        described = _run_git(Path(top), "describe", "--always", "--tags").stdout.strip()
        yield msgspec.structs.replace(git, describe=described)


def _run_status(top: Path) -> tuple[subprocesses.Completed, str]:
    """Run `git status`; if it times out, again without untracked files. Also return the problem, "" for none."""
    try:
        return _run_git(top, *_STATUS, "--untracked-files=all"), ""
    except Unreachable as error:
        return _run_git(top, *_STATUS, "--untracked-files=no"), f"untracked files are unknown: {error.message}"


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
    git = msgspec.structs.replace(git, left_out=left_out_entries)
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
            done = _run_git(top, *_ADD, names, "--pathspec-file-nul", env=env)
            git = _with_problem(git, f"untracked files are in no patch: {_git_error(done)}") if done.code else git
        base = git.commit or _run_git(top, "hash-object", "-t", "tree", "/dev/null").stdout.strip()
        excluding = [f":(top,exclude,literal){name}" for name in changed_but_left_out]
        descriptor = os.open(patch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            done = _run_git(top, *_DIFF, base, "--", ".", *excluding, env=env, stdout=out)
        size, text = digest.digest_file(patch)
        problem = _git_error(done) if done.code else ""
        if size > PATCH_MAX_BYTES:
            problem = f"patch too large: {size} bytes (at most {PATCH_MAX_BYTES})"
    except (PitError, OSError) as error:
        problem = _error_text(error)
    finally:
        for path in (index_copy, names_file, index_copy.with_name(f"{index_copy.name}.lock")):
            path.unlink(missing_ok=True)
    if problem:
        patch.unlink(missing_ok=True)
        return _with_problem(git, problem)
    return msgspec.structs.replace(git, patch=text, patch_bytes=size)


def _excluded_names(top: Path, workdir: Path, changed: Sequence[str], untracked: Sequence[str]) -> set[str]:
    """Return the names that are excluded from the patch: secrets, private files, and those in `.pitignore`."""
    root = workdir.resolve()
    tracked = [str((top / name).relative_to(root)) for name in changed if (top / name).is_relative_to(root)]
    rules = CopyRules(root, (), tracked)

    def is_excluded(name: str, is_tracked: bool) -> bool:
        path = top / name
        if path.is_relative_to(root):
            return rules.exclusion_reason(path) != ""
        return is_secret_file(path, name) or (not is_tracked and rules.is_private(path))

    return {
        name
        for names, is_tracked in ((changed, True), (untracked, False))
        for name in names
        if is_excluded(name, is_tracked)
    }


def ignored_paths(workdir: Path) -> list[str] | None:
    """Return the files and whole folders that git ignores, relative to the workdir; None if git fails."""
    return _list_files(workdir, "--others", "--ignored", "--exclude-standard", "--directory")


def tracked_files(workdir: Path) -> list[str]:
    """Return the files that git tracks, relative to the workdir; [] if git fails."""
    return _list_files(workdir) or []


def _list_files(workdir: Path, *args: str) -> list[str] | None:
    try:
        done = _run_git(workdir.resolve(), "ls-files", "-z", *args)
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
