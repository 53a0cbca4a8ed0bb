"""Find a user's access to an object store in the environment and in files: keys, profile, region, endpoint.

The values go to the library that signs requests, and nowhere else: messages contain only the names of variables, files
and profiles.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import ClusterError, ConfigError, suggest

_TRUE_VALUES = ("1", "true", "yes", "on")
# Profile keys that get credentials by a program or a browser.
_UNSUPPORTED_KEYS = ("credential_process", "sso_session", "sso_start_url", "source_profile", "credential_source")


class AccessOptions(NamedTuple):
    """Options of the library's store, and of its HTTP client.

    Holds secrets: it is created where it is used, and never stored, printed or sent.
    """

    options: dict[str, str]
    client: dict[str, str | bool]

    def __repr__(self) -> str:
        return "AccessOptions(…)"


def read_access(scheme: str) -> AccessOptions:
    """Read the access to this kind of store from the environment and the user's files. Raises ConfigError,
    ClusterError.
    """
    options, client = {"s3": _s3_access, "gs": _gs_access, "az": _az_access}[scheme](os.environ)
    endpoint = next((options[key] for key in ("endpoint", "base_url") if key in options), "")
    if "@" in endpoint or "?" in endpoint:
        hint = "give keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in a profile"
        raise ConfigError("the endpoint's URL carries a name, a password or a signature", where=scheme, hint=hint)
    # Plain HTTP only by an explicit http://, never by a default or a redirect.
    client["allow_http"] = endpoint.startswith("http://") or _is_set(os.environ, "AWS_ALLOW_HTTP")
    return AccessOptions(options, client)


def search_hint(scheme: str) -> str:
    """Return a hint with the places that were searched for credentials."""
    if scheme == "gs":
        return (
            "searched GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, gcloud's application default "
            "credentials, and the instance's metadata; a public bucket: GOOGLE_SKIP_SIGNATURE=true"
        )
    if scheme == "az":
        return (
            "searched AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET "
            "or AZURE_FEDERATED_TOKEN_FILE, and the instance's identity; a public container: AZURE_SKIP_SIGNATURE=true"
        )
    return (
        f"searched AWS_ACCESS_KEY_ID, profile {_profile_name(os.environ)!r} of "
        f"{_file_path(os.environ, 'credentials')} and {_file_path(os.environ, 'config')}, AWS_WEB_IDENTITY_TOKEN_FILE, "
        "and the container's and instance's metadata; a public bucket: AWS_NO_SIGN_REQUEST=1"
    )


def _s3_access(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    profile = _profile(env)
    options: dict[str, str] = {}
    if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region"):
        options["region"] = region
    endpoints = [env.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    if endpoint := next(filter(None, endpoints), None) or profile.get("endpoint_url"):
        options["endpoint"] = endpoint
    client: dict[str, str | bool] = {}
    if bundle := env.get("AWS_CA_BUNDLE") or profile.get("ca_bundle"):
        client["root_certificate"] = _read_text(Path(bundle))
    if _is_set(env, "AWS_NO_SIGN_REQUEST"):
        options["skip_signature"] = "true"
    # Keys in the environment override a profile. The library reads them itself, as well as the variables of web
    # identity and container credentials.
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
    if unsupported_key := next((key for key in _UNSUPPORTED_KEYS if profile.get(key)), None):
        name = _profile_name(env)
        message = f"profile {name!r} uses {unsupported_key} instead of keys, which only the AWS CLI supports"
        hint = f'eval "$(aws configure export-credentials --profile {name} --format env)", then run it again'
        raise ClusterError(message, where=_file_path(env, "config"), hint=hint)
    if _is_set(env, "AWS_EC2_METADATA_DISABLED") and not any(name.startswith("AWS_CONTAINER_") for name in env):
        raise ClusterError("there are no credentials for s3", hint=search_hint("s3"))
    return {}


def _gs_access(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    return ({"base_url": env["GOOGLE_BASE_URL"]} if env.get("GOOGLE_BASE_URL") else {}), {}


def _az_access(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | bool]]:
    options = {}
    for key, names in {
        # The names of Azure's own tools; the library also reads its own.
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


def _file_path(env: Mapping[str, str], kind: str) -> str:
    path = env.get({"credentials": "AWS_SHARED_CREDENTIALS_FILE", "config": "AWS_CONFIG_FILE"}[kind])
    return str(Path(path or f"~/.aws/{kind}").expanduser())


def _profile(env: Mapping[str, str]) -> dict[str, str]:
    """Merge the keys of the selected profile in both files; `credentials` overrides `config`."""
    name = _profile_name(env)
    config, credentials = _parse_ini(_file_path(env, "config")), _parse_ini(_file_path(env, "credentials"))
    sections = [section for section in (name, f"profile {name}") if config.has_section(section)]
    values = {key: value for section in sections for key, value in config.items(section)}
    if credentials.has_section(name):
        values |= dict(credentials.items(name))
    elif not sections and name != "default":
        profile_names = {*credentials.sections(), *(section.removeprefix("profile ") for section in config.sections())}
        where = f"{_file_path(env, 'credentials')}, {_file_path(env, 'config')}"
        raise ConfigError(f"there is no profile {name!r}", where=where, hint=suggest(name, profile_names))
    return values


def _parse_ini(path: str) -> configparser.RawConfigParser:
    # Raw: a % in a secret is no reference. The section of defaults is renamed: [DEFAULT] is a profile.
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    lines: list[int] | None = None
    try:
        parser.read_string(_read_text(Path(path), missing=""))
    except configparser.MissingSectionHeaderError as error:
        lines = [error.lineno]
    except configparser.ParsingError as error:
        lines = [number for number, _ in error.errors]
    except configparser.Error:
        lines = []
    if lines is not None:  # raised here, unchained: the parser's message contains lines, perhaps keys
        location = f"{path}:{lines[0]}" if lines else path
        raise ConfigError("not an INI file of `[profile]` and `key = value` lines", where=location)
    return parser


def _read_text(path: Path, *, missing: str | None = None) -> str:
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
