"""Exclude files from copies of a workdir: secrets by well-known names, private files, ignored files."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pathspec import GitIgnoreSpec

from pitools.core.errors import ConfigError
from pitools.core.fs import open_regular

PITIGNORE, GITIGNORE = ".pitignore", ".gitignore"
ExclusionReason = Literal["", "secret", "private", "ignored"]
_KEY_BYTES = 64 << 10  # no private key is larger
_SECRETS = GitIgnoreSpec.from_lines(
    [
        ".env",
        ".env.*",
        "!.env.example",
        "!.env.sample",
        "!.env.template",
        "!.env.dist",
        ".envrc",
        ".netrc",
        "_netrc",
        ".netrc~",
        ".pgpass",
        ".my.cnf",
        ".npmrc",
        ".pypirc",
        ".git-credentials",
        ".vault-token",
        ".htpasswd",
        ".s3cfg",
        ".boto",
        ".dockercfg",
        ".databrickscfg",
        ".passwd-s3fs",
        "rclone.conf",
        "kubeconfig",
        ".hf_token",
        ".bash_history",
        ".zsh_history",
        ".python_history",
        ".env~",
        ".aws/",
        ".azure/",
        ".gnupg/",
        ".huggingface/",
        ".kaggle/",
        ".kube/",
        ".oci/",
        ".ssh/",
        ".config/gcloud/",
        ".cache/huggingface/token",
        ".docker/config.json",
        ".streamlit/secrets.toml",
        "application_default_credentials.json",
        "client_secret*.json",
        "credentials.json",
        "service-account*.json",
        "service_account*.json",
        "id_rsa",
        "id_dsa",
        "id_ecdsa",
        "id_ecdsa_sk",
        "id_ed25519",
        "id_ed25519_sk",
        "*.jks",
        "*.kdbx",
        "*.keystore",
        "*.p12",
        "*.pfx",
        "*.ppk",
        "prod.env",
        "production.env",
        *(f"{stem}.{end}" for stem in ("secret", "secrets") for end in ("env", "json", "toml", "txt", "yaml", "yml")),
        "*.secret",
        ".secrets",
        "api_key.txt",
        "password.txt",
        "passwords.txt",
        "token.txt",
        "hf_token",
        "hf_token.txt",
        "wandb_key",
        "wandb_key.txt",
        "*.tfstate",
        "*.tfstate.*",
    ]
)


def is_secret_file(path: Path, name: str) -> bool:
    """Return whether a path is a secret, by its name relative to the workdir, or as a PEM private key."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # removed, as in a change listed by git: only its name can be checked
        mode = stat.S_IFREG
    # Names are compared without case, as on the file systems that some workdirs are copied from.
    pattern_name = f"{name}/".lower() if stat.S_ISDIR(mode) else name.lower()
    return bool(_SECRETS.check_file(pattern_name).include) or (stat.S_ISREG(mode) and _is_private_key(path))


class CopyRules:
    """The exclusion rules of one workdir. A rule of `.pitignore` overrides earlier rules, and all but secrets.

    A file is private if only its owner may read it, unlike half of the files of its folder or of the root, and git does
    not track it. Under umask 077 all files are alike, and none is private; programs and scripts to execute never are.

    Args:
        root: the workdir; its `.pitignore` is read, in gitignore's syntax.
        ignored: files and whole folders below `root` that git ignores; None if unknown: then `root/.gitignore` is
            read instead.
        tracked: files below `root` that git tracks.

    Raises ConfigError for an unreadable `.pitignore`.
    """

    def __init__(self, root: Path, ignored: Iterable[str] | None, tracked: Iterable[str] = ()) -> None:
        self._root = root
        self._ignored = frozenset(ignored or ())
        self._tracked = frozenset(tracked)
        self._is_open = functools.cache(_is_open)
        names = (PITIGNORE,) if ignored is not None else (GITIGNORE, PITIGNORE)
        self._rules = GitIgnoreSpec.from_lines(line for name in names for line in _read_rules(root / name))

    def exclusion_reason(self, path: Path) -> ExclusionReason:
        """Return why a path below the root is excluded, "" if it is not. Its parents are not checked."""
        name = str(path.relative_to(self._root))
        if is_secret_file(path, name):
            return "secret"
        is_folder = path.is_dir() and not path.is_symlink()
        is_excluded = self._rules.check_file(f"{name}/" if is_folder else name).include
        if name in self._ignored if is_excluded is None else is_excluded:
            return "ignored"
        return "private" if is_excluded is None and name not in self._tracked and self.is_private(path) else ""

    def is_private(self, path: Path) -> bool:
        """Return whether a file that git does not track is private, also one outside of the root."""
        return _is_closed(path) and (self._is_open(path.parent) or self._is_open(self._root))


def _is_open(folder: Path) -> bool:
    """Return whether others may read at least half of a folder's files."""
    closed = [_is_closed(Path(entry)) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    return 0 < len(closed) >= 2 * sum(closed)


def _is_closed(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:  # removed meanwhile
        return False
    return stat.S_ISREG(mode) and mode & 0o577 == stat.S_IRUSR


def _read_rules(path: Path) -> list[str]:
    """Return the lines of a rules file; [] without the file."""
    try:
        with open_regular(path) as file:
            return os.fsdecode(file.read()).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", where=str(path), hint="make it a readable file") from error


def _is_private_key(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _KEY_BYTES:
                return False
            first = file.readline(128)
    except OSError:  # reported by the copy
        return False
    return first.startswith(b"-----BEGIN ") and b"PRIVATE KEY" in first
