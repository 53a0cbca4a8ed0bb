"""How a user's environment and files say to reach an object store: keys, profile, region, endpoint.

What is found goes to the library that signs requests, and nowhere else: no message here holds a value, only the
names of variables, files and profiles.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import ClusterError, ConfigError, suggest

_TRUE_VALUES = ("1", "true", "yes", "on")
# Ways to get keys that need a program or a browser, and what in a profile asks for them.
_UNSUPPORTED_KEYS = ("credential_process", "sso_session", "sso_start_url", "source_profile", "credential_source")


class AccessOptions(NamedTuple):
    """How to reach a store: the library's options of that store, and of its HTTP client.

    It holds secrets: it is made where it is used, and is not kept, printed or sent.
    """

    options: dict[str, str]
    client: dict[str, str | bool]

    def __repr__(self) -> str:
        return "Access(…)"


def read_access(scheme: str) -> AccessOptions:
    """How the environment and the user's files say to reach this kind of store. Raises ConfigError, ClusterError."""
    options, client = {"s3": _s3, "gs": _gs, "az": _az}[scheme](os.environ)
    endpoint = next((options[key] for key in ("endpoint", "base_url") if key in options), "")
    if "@" in endpoint or "?" in endpoint:
        hint = "give keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in a profile"
        raise ConfigError("the endpoint's URL carries a name, a password or a signature", where=scheme, hint=hint)
    # Whoever writes http:// means it; nobody is taken there by a default or a redirect.
    client["allow_http"] = endpoint.startswith("http://") or _is_set(os.environ, "AWS_ALLOW_HTTP")
    return AccessOptions(options, client)


def search_hint(scheme: str) -> str:
    """The places where credentials were looked for, as a hint for one who has none or the wrong ones."""
    if scheme == "gs":
        return (
            "looked in GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, gcloud's application default "
            "credentials, and the instance's metadata; a public bucket: GOOGLE_SKIP_SIGNATURE=true"
        )
    if scheme == "az":
        return (
            "looked in AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET "
            "or AZURE_FEDERATED_TOKEN_FILE, and the instance's identity; a public container: AZURE_SKIP_SIGNATURE=true"
        )
    return (
        f"looked in AWS_ACCESS_KEY_ID, profile {_profile_name(os.environ)!r} of {_file(os.environ, 'credentials')} and "
        f"{_file(os.environ, 'config')}, AWS_WEB_IDENTITY_TOKEN_FILE, and the container's and instance's metadata; "
        "a public bucket: AWS_NO_SIGN_REQUEST=1"
    )


def _s3(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    profile = _profile(env)
    options: dict[str, str] = {}
    if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region"):
        options["region"] = region
    named = [env.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    if endpoint := next(filter(None, named), None) or profile.get("endpoint_url"):
        options["endpoint"] = endpoint
    client: dict[str, str | bool] = {}
    if bundle := env.get("AWS_CA_BUNDLE") or profile.get("ca_bundle"):
        client["root_certificate"] = _read(Path(bundle))
    if _is_set(env, "AWS_NO_SIGN_REQUEST"):
        options["skip_signature"] = "true"
    # Keys in the environment come before a profile, as everywhere; the library itself reads them, and also the
    # variables of web identity and container credentials.
    elif not any(env.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        options |= _access_keys(profile, env)
    return options, client


def _access_keys(profile: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    if profile.get("aws_access_key_id") and profile.get("aws_secret_access_key"):
        keys = {name: profile[f"aws_{name}"] for name in ("access_key_id", "secret_access_key")}
        if token := profile.get("aws_session_token"):
            keys["session_token"] = token
        return keys
    if profile.get("role_arn") and profile.get("web_identity_token_file"):
        names = ("role_arn", "web_identity_token_file", "role_session_name")
        return {name: profile[name] for name in names if profile.get(name)}
    if asked := next((key for key in _UNSUPPORTED_KEYS if profile.get(key)), None):
        name = _profile_name(env)
        message = f"profile {name!r} has no keys of its own but {asked}, which takes the AWS CLI to follow"
        hint = f'eval "$(aws configure export-credentials --profile {name} --format env)", then run it again'
        raise ClusterError(message, where=_file(env, "config"), hint=hint)
    if _is_set(env, "AWS_EC2_METADATA_DISABLED") and not any(name.startswith("AWS_CONTAINER_") for name in env):
        raise ClusterError("there are no credentials for s3", hint=search_hint("s3"))
    return {}


def _gs(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    return ({"base_url": env["GOOGLE_BASE_URL"]} if env.get("GOOGLE_BASE_URL") else {}), {}


def _az(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    options = {}
    for key, names in {
        # The names of Azure's own tools; the library reads its own.
        "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
        "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.items():
        if value := next((env[name] for name in names if env.get(name)), ""):
            options[key] = value
    if "account_name" not in options:
        raise ClusterError("no storage account is named", where="az", hint="export AZURE_STORAGE_ACCOUNT_NAME")
    return options, {}


def _is_set(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in _TRUE_VALUES


def _profile_name(env: Mapping[str, str]) -> str:
    return env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default"


def _file(env: Mapping[str, str], kind: str) -> str:
    named = env.get({"credentials": "AWS_SHARED_CREDENTIALS_FILE", "config": "AWS_CONFIG_FILE"}[kind])
    return str(Path(named or f"~/.aws/{kind}").expanduser())


def _profile(env: Mapping[str, str]) -> dict[str, str]:
    """Everything both files say of the chosen profile; of a key in both, what `credentials` says."""
    name = _profile_name(env)
    config, credentials = _parse(_file(env, "config")), _parse(_file(env, "credentials"))
    sections = [section for section in (name, f"profile {name}") if config.has_section(section)]
    found = {key: value for section in sections for key, value in config.items(section)}
    if credentials.has_section(name):
        found |= dict(credentials.items(name))
    elif not sections and name != "default":
        known = {*credentials.sections(), *(section.removeprefix("profile ") for section in config.sections())}
        where = f"{_file(env, 'credentials')}, {_file(env, 'config')}"
        raise ConfigError(f"there is no profile {name!r}", where=where, hint=suggest(name, known))
    return found


def _parse(path: str) -> configparser.RawConfigParser:
    # Raw: a % in a secret is no reference. A name of its own for the section of defaults: [DEFAULT] is a profile.
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    lines: list[int] | None = None
    try:
        parser.read_string(_read(Path(path), missing=""))
    except configparser.MissingSectionHeaderError as error:
        lines = [error.lineno]
    except configparser.ParsingError as error:
        lines = [number for number, _ in error.errors]
    except configparser.Error:
        lines = []
    if lines is not None:  # raised here: the parser's own words hold the lines, hence maybe the keys
        at = f"{path}:{lines[0]}" if lines else path
        raise ConfigError("this is not `[profile]` and `key = value` lines", where=at)
    return parser


def _read(path: Path, *, missing: str | None = None) -> str:
    try:
        return path.expanduser().read_text()
    except FileNotFoundError as error:
        if missing is None:
            raise ConfigError("there is no such file", where=str(path)) from error
        return missing
    except UnicodeDecodeError:
        reason = "it is not text"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    raise ConfigError(reason, where=str(path))
