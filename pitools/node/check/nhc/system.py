"""NHC's checks of hardware, network and processes, and the table of all that are made, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pitools.node.check.nhc import files
from pitools.node.check.nhc.match import (
    NO_SIDE_EFFECTS,
    Converter,
    Fields,
    UnsupportedError,
    above_regex,
    count_of,
    glob_regex,
    limits_of,
    match_regex,
    needed,
    option_values,
    options_of,
    share_of,
    size_bytes,
    where_value,
)

UID_MIN = "1000"
_OF_ONE_CPU = re.compile(r"\[?(?:kworker|ksoftirqd|migration|cpuhp|idle_inject|irq|rcu[ocb]|watchdog)\b")
_READ_WRITE, _READ_ONLY = "/(^|,)rw($|,)/", "/(^|,)ro($|,)/"

# --- Hardware ---


def _one(
    arguments: list[str], _: dict[str, str], *, test: str, read: Callable[[str], Any] = count_of, **fields: Any
) -> Fields:
    """Of one argument, which is the value of a test."""
    yield {**fields, test: read(needed(arguments, 1)[0])}


def _each(arguments: list[str], _: dict[str, str], *, test: str, keys: tuple[str, ...], less: float = 0) -> Fields:
    """Of an argument for each of these keys of `system`; those that are empty ask for nothing. less: taken off it."""
    for key, text in zip(keys, arguments, strict=False):
        if text:
            yield {"about": key, "table": "system", "key": key, test: count_of(text) - less}


def _memory(arguments: list[str], _: dict[str, str], *, key: str) -> Fields:
    low, high, slack, *_rest = needed(arguments, 1)
    yield {"table": "system", "key": key, **limits_of(low, high, size_bytes, slack)}


def _infiniband(arguments: list[str], _: dict[str, str]) -> Fields:
    rate, device, *_rest = needed(arguments, 1)
    where: dict[str, Any] = {"state": "ACTIVE", "physical_state": "LinkUp", "rate_gbps": count_of(rate)}
    if device:
        where["port" if ":" in device else "device"] = device.replace(":", "/")
    yield {"about": device or rate, "table": "rdma_ports", "where": where, "min_count": 1}


def _ethernet(arguments: list[str], _: dict[str, str]) -> Fields:
    name = needed(arguments, 1)[0]
    yield {"about": name, "table": "interfaces", "where": {"interface": name}, "min_count": 1}


def _mcelog(_arguments: list[str], variables: dict[str, str]) -> Fields:
    """Of each DIMM: by lines of EDAC; others come along with these, or are of caches. Those within 5 s count once."""
    fields = {"table": "kernel_log", "max_age": "24h", "group_by": ("device",)}
    for about, is_fatal, name, default in (
        ("uncorrected", True, "MCELOG_MAX_UNCORRECTED_RATE", "0"),
        ("corrected", False, "MCELOG_MAX_CORRECTED_RATE", "9"),
    ):
        if limit := variables.get(name, default):
            where = {"kind": "edac", "is_fatal": is_fatal}
            yield {"about": about, **fields, "where": where, "max_count": count_of(limit)}


# --- Network ---


def _ping(arguments: list[str], _: dict[str, str]) -> Fields:
    pairs, hosts = options_of(arguments, "I:W:c:i:s:t:w:")
    for host in hosts:
        where = {"endpoint": f"ping://{host}"}
        yield {"about": host, "table": "endpoints", "where": where, "key": "responds", "equals": True}
    if pairs or not hosts:
        yield "options of ping are not taken" if hosts else "names no host"


# --- Processes ---


def _daemon(arguments: list[str], _: dict[str, str], *, limit: dict[str, int]) -> Fields:
    name, owner, words, *_rest = needed(arguments, 1)
    text = f"{name} {words}" if words else name
    if _OF_ONE_CPU.match(name):
        raise UnsupportedError("kernel threads of one CPU are not read")
    where = {"command": f"re:(?s:.*){glob_regex(text)}(?s:.*)", **_owned_by(owner)}
    yield {"about": text, "table": "processes", "where": where, **limit}


def _service(arguments: list[str], _: dict[str, str]) -> Fields:
    pairs, words = options_of(arguments, "0E:SVcd:e:fkm:rsu:v")
    given = dict(pairs)
    name = " ".join(words)
    if not name:
        raise UnsupportedError("names no service")
    text = given.get("m") or f"*{given.get('d') or name}"
    where = {"command": f"re:{match_regex(text, of_first_word='f' not in given)}", **_owned_by(given.get("u", ""))}
    test = {"max_count": 0} if {"E", "k", "s"} & set(given) else {"min_count": 1}
    yield {"about": name, "table": "processes", "where": where, **test, "reports_only": "0" in given}
    if set(given) & set("EScekrsvV"):
        yield NO_SIDE_EFFECTS


def _owned_by(owner: str) -> dict[str, Any]:
    """Return the fields of `where` for an owner: a uid, or a match string of names; "": anyone."""
    if not owner:
        return {}
    return {"uid": count_of(owner)} if owner.isdecimal() else {"user": where_value(owner)}


def _resource(arguments: list[str], variables: dict[str, str], *, limit: Callable[[str], dict[str, Any]]) -> Fields:
    """Processes of ordinary users may use no more than a limit."""
    pairs, rest = options_of(arguments, "0AKae:fklm:r:su:")
    given = dict(pairs)
    text = given.get("m", "")
    where: dict[str, Any] = {}
    if "A" not in given:
        where["uid"] = f"re:{above_regex(_max_system_uid(variables))}"
    if text:
        where["command"] = f"re:{match_regex(text, of_first_word='f' not in given)}"
    owned_by = _owned_by(owner := given.get("u", ""))
    if "uid" in where and owned_by.get("uid", math.inf) <= _max_system_uid(variables):
        raise UnsupportedError(f"-u {owner}: processes of the system are left out (expected -A)")
    where |= owned_by
    about = text or owner
    test = limit(needed(rest, 1)[0])
    yield {"about": about, "table": "processes", "where": where, **test, "reports_only": "0" in given}
    if set(given) & set("Kekr"):
        yield NO_SIDE_EFFECTS


def _max_system_uid(variables: dict[str, str]) -> int:
    return count_of(variables.get("MAX_SYS_UID") or UID_MIN)


def _cpu_seconds(text: str) -> dict[str, Any]:
    minutes, _m, seconds = text.lower().removesuffix("s").rpartition("m")
    return {"key": "cpu_s", "max": count_of(minutes or "0") * 60 + count_of(seconds or "0")}


def _reports_only(actions: list[str]) -> bool:
    given = {action for action in actions if action}
    return bool(given) and "die" not in given


def _strangers(arguments: list[str], variables: dict[str, str], *, is_report: bool = False) -> Fields:
    """Processes of ordinary users that are of no job. is_report: never more than a warning."""
    pairs, actions = options_of(arguments, "c:n:p:u:")
    if option_values(pairs, "p") or "RM_DAEMON_MATCH" in variables:
        raise UnsupportedError("-p and RM_DAEMON_MATCH are not read")
    uids, names, commands = (_words_of(option_values(pairs, letter)) for letter in "unc")
    names += _words_of([variables.get("NHC_AUTH_USERS", "root nobody")])
    where: dict[str, Any] = {
        "job_id": "",
        "is_kernel": False,
        "uid": f"re:(?!{_any_of(uids)}$)(?:{above_regex(_max_system_uid(variables))})",
        "user": f"re:(?!{_any_of(names)}$).*",
    }
    if commands:
        where["command"] = f"re:(?!{_any_of(commands)}(?: |$)).*"
    yield {"table": "processes", "where": where, "max_count": 0, "reports_only": is_report or _reports_only(actions)}
    if is_report:
        yield "users of running jobs are not excepted: it only warns"
    if "kill" in actions:
        yield NO_SIDE_EFFECTS


def _words_of(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in re.split(r"[\s,;]+", text) if word]


def _any_of(words: list[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, words))})" if words else "(?!)"


_SYSTEM_SIZE: dict[str, Any] = {"test": "min", "read": size_bytes, "table": "system"}
CONVERTERS: dict[str, Converter] = {
    "check_cmd_output": files.command,
    "check_cmd_status": files.command,
    "check_cmd_dmesg": partial(files.command, program="dmesg"),
    "check_file_contents": files.file_contents,
    "check_file_stat": files.file_stat,
    "check_file_test": files.file_test,
    "check_fs_mount": files.mount,
    "check_fs_mount_rw": partial(files.mount, options=_READ_WRITE),
    "check_fs_mount_ro": partial(files.mount, options=_READ_ONLY),
    "check_fs_size": partial(files.space, key="size_bytes"),
    "check_fs_free": partial(files.space, key="free_bytes", share="used_share", is_free=True),
    "check_fs_used": partial(files.space, key="used_bytes", share="used_share"),
    "check_fs_inodes": partial(files.space, key="inodes"),
    "check_fs_ifree": partial(files.space, key="inodes_free", share="inodes_used_share", is_free=True),
    "check_fs_iused": partial(files.space, key="", share="inodes_used_share"),
    "check_hw_cpuinfo": partial(_each, test="equals", keys=("sockets", "cores", "cpus")),
    "check_hw_physmem": partial(_memory, key="memory_bytes"),
    "check_hw_physmem_free": partial(_one, **_SYSTEM_SIZE, key="memory_free_bytes"),
    "check_hw_swap": partial(_memory, key="swap_bytes"),
    "check_hw_swap_free": partial(_one, **_SYSTEM_SIZE, key="swap_free_bytes"),
    "check_hw_ib": _infiniband,
    "check_hw_eth": _ethernet,
    "check_hw_mcelog": _mcelog,
    "check_net_ping": _ping,
    "check_ps_daemon": partial(_daemon, limit={"min_count": 1}),
    "check_ps_blacklist": partial(_daemon, limit={"max_count": 0}),
    "check_ps_service": _service,
    "check_ps_cpu": partial(_resource, limit=lambda text: {"key": "cpu_share", "max": share_of(text)}),
    "check_ps_physmem": partial(
        _resource,
        limit=lambda text: (
            {"key": "memory_share", "max": share_of(text)}
            if text.endswith("%")
            else {"key": "memory_bytes", "max": size_bytes(text)}
        ),
    ),
    "check_ps_time": partial(_resource, limit=_cpu_seconds),
    "check_ps_loadavg": partial(_each, test="max", keys=("load_1m", "load_5m", "load_15m"), less=0.005),
    "check_ps_unauth_users": partial(_strangers, is_report=True),
    "check_ps_userproc_lineage": _strangers,
    # Azure
    "check_gpu_count": partial(_one, test="count", table="gpus"),
    "check_nvme_count": partial(_one, test="count", table="block_devices", where={"device": "nvme*n1"}),
    "check_vbios_version": partial(_one, test="equals", read=str, table="gpus", key="vbios"),
}
