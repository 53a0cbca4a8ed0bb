"""Record a run's Python interpreter and its installed packages, in `environment.txt`, and selected variables.

`name==version` per line, then ` @ URL` for a package that is not from an index, and ` (editable)` for a package whose
code is in another folder and may change at any time.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from pitools.core import subprocesses
from pitools.core.errors import PitError
from pitools.launch.provenance import git_state
from pitools.site.schema import Site
from pitools.store import digest

ENVIRONMENT_FILE = "environment.txt"
_TIMEOUT_S = 60.0
# Names and versions are parsed from folder names, which saves reading thousands of files.
_LIST_PACKAGES = r"""
import json, os, re, sys
packages = {}
for folder in sys.path[1:]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        continue
    for name in names:
        stem, dot, kind = name.rpartition(".")
        if kind not in ("dist-info", "egg-info"):
            continue
        package, _, version = stem.partition("-")
        version = re.sub(r"-py\d[\d.]*$", "", version)
        path = os.path.join(folder, name)
        if not version:
            try:
                with open(os.path.join(path, "PKG-INFO") if os.path.isdir(path) else path, errors="replace") as file:
                    version = next((line[8:].strip() for line in file if line.startswith("Version:")), "")
            except OSError:
                pass
        address = ""
        try:
            with open(os.path.join(path, "direct_url.json")) as file:
                address = file.read(8192)
        except OSError:
            pass
        packages.setdefault(re.sub(r"[-_.]+", "-", package).lower(), [version, address])
print(json.dumps([sys.version.split()[0], sys.implementation.name, sys.executable, packages]))
"""
# Variables that affect a computation. Any other variable may be a secret: only its name is recorded.
_RECORDED_VARIABLES = re.compile(
    r"(CUDA|CUDNN|CUBLAS|NCCL|XLA|JAX|TF_XLA|TF_CPP|TF_GPU|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|KMP|GOMP|UCX|FI|GLOO|OMPI|NVIDIA|ROCR"
    r"|HIP|TPU|LC|MALLOC)_[A-Z0-9_]+"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHASHSEED|PYTHONSAFEPATH|LANG|TZ|VIRTUAL_ENV|CONDA_DEFAULT_ENV"
    r"|CONDA_PREFIX|LOADEDMODULES"
)
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|KEY|PASS|PWD|CRED|AUTH|COOKIE|PROXY|SIGNATURE|SESSION|URL|URI|DSN", re.IGNORECASE
)
_MAX_VALUE = 8192
_VARIABLE_USE = re.compile(r"\$(?:\{[#!]?)?([A-Za-z_][A-Za-z0-9_]*)")  # $NAME, ${NAME…}, ${#NAME}


class Editable(msgspec.Struct, frozen=True, kw_only=True):
    """A package that is installed editable. path: its folder, which may change. git_describe: of that folder."""

    name: str
    path: str
    git_describe: str = ""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter and its packages. packages: their number. digest: of environment.txt. problem: why unknown."""

    python: str = ""
    implementation: str = ""
    executable: str = ""
    packages: int = 0
    digest: str = ""
    editable: tuple[Editable, ...] = ()
    problem: str = ""


def capture_environment(python: str, site: Site, env: Mapping[str, str]) -> tuple[Environment, str]:
    """Run an interpreter to list its packages; return them, and the text of environment.txt.

    python: the ranks' interpreter, which may differ from this process's. Does not raise: `problem` is set after a
    failure, and for ranks in a container or at a remote site.
    """
    if site.container.runtime != "none":
        return Environment(problem=f"the ranks run in a container: {site.container.image}"), ""
    if site.connection.kind == "ssh":
        return Environment(problem=f"the ranks run at {site.connection.host}, with {python}"), ""
    try:
        done = subprocesses.run([python, "-c", _LIST_PACKAGES], timeout_s=_TIMEOUT_S, env=env)
    except PitError as error:
        return Environment(problem=f"{python}: {error.message}"), ""
    try:
        version, implementation, executable, packages = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.code} without output"])[-1]
        return Environment(problem=f"{python}: {last}"), ""
    lines, editable = [], []
    for name, (number, direct_url) in sorted(packages.items()):
        address, is_editable = _package_origin(direct_url)
        lines.append(f"{name}=={number}" + (f" @ {address}" if address else "") + (" (editable)" * is_editable))
        if is_editable:
            path = urllib.parse.unquote(urllib.parse.urlsplit(address).path)
            editable.append(Editable(name=name, path=path, git_describe=git_state.git_describe(Path(path))))
    text = "".join(f"{line}\n" for line in lines)
    environment = Environment(
        python=version,
        implementation=implementation,
        executable=executable,
        packages=len(lines),
        digest=digest.digest_bytes(text.encode()),
        editable=tuple(editable),
    )
    return environment, text


def select_variables(
    environ: Mapping[str, str] = os.environ, *, command: str = "", env: Collection[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that affect a computation, with their values; and the names of all others.

    command: the request's command; the variables used in it are included, but for those that the request sets in `env`.
    """
    used_names = set(_VARIABLE_USE.findall(command)) - set(env)
    selected = {
        name: value for name, value in sorted(environ.items()) if _is_harmless(name, value, is_read=name in used_names)
    }
    return selected, tuple(sorted(name for name in environ if name not in selected and name.isprintable()))


def is_secret_variable(name: str) -> bool:
    """Return whether a variable of this name is probably a secret."""
    return bool(_SECRET_NAME.search(name))


def parse_packages(text: str) -> dict[str, str]:
    """Return package → version and origin, from environment.txt."""
    return {line.partition("==")[0]: line.partition("==")[2] for line in text.splitlines() if line.strip()}


def _is_harmless(name: str, value: str, *, is_read: bool) -> bool:
    # A URL may contain a password.
    is_selected = (is_read or _RECORDED_VARIABLES.fullmatch(name)) and not is_secret_variable(name)
    return bool(is_selected) and value.isprintable() and len(value) <= _MAX_VALUE and "://" not in value


def _package_origin(direct_url: str) -> tuple[str, bool]:
    """Return a package's URL without credentials, and whether it is editable, from its direct_url.json."""
    try:
        fields = json.loads(direct_url) if direct_url else {}
        url = urllib.parse.urlsplit(str(fields.get("url", "")))
        is_editable = bool(fields.get("dir_info", {}).get("editable"))
        commit = str(fields.get("vcs_info", {}).get("commit_id", ""))
    except (ValueError, AttributeError):
        return "", False
    # The query is dropped, which may contain a token.
    address = urllib.parse.urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    return (f"{address}@{commit}" if commit else address), is_editable
