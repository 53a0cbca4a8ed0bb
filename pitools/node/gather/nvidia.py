"""Read NVIDIA's GPUs through NVML. Any of its calls may fail, on any GPU: that value is None."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

from pitools.core.errors import ClusterError, ToolMissing
from pitools.node.gather.platform import PciDevice, pci_responds
from pitools.node.gather.read import Query, read_text
from pitools.node.tables import TABLES
from pitools.node.types import Row, Value

_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_NO_PERMISSION = 4
_MEMORY_V2 = 0x02000028  # whose `used` leaves out what the driver keeps for itself
_SLOWDOWNS = {
    0x04: "SwPowerCap",
    0x08: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
}
_RECOVERY_ACTIONS = TABLES["gpus"].keys["recovery_action"].values  # by NVML's number
_FABRIC_STATES = {1: "not-started", 2: "in-progress", 3: "completed"}
_FABRIC_COMPLETED = 3
_FABRIC_PROBLEMS = ("degraded-bandwidth", "route-recovery", "route-unhealthy", "access-timeout")
_FIELD_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by c_nvmlFieldValue_t.valueType
_NVLINK_TOTALS = tuple(
    f"NVML_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL" for name in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
)
# Of a link, from NVLink 5 on, which has no totals. Bit errors that were corrected on the way are not among them.
_NVLINK_COUNTS = tuple(
    f"NVML_FI_DEV_NVLINK_COUNT_{name}"
    for name in (
        "MALFORMED_PACKET_ERRORS",
        "BUFFER_OVERRUN_ERRORS",
        "RCV_ERRORS",
        "LOCAL_LINK_INTEGRITY_ERRORS",
        "LINK_RECOVERY_FAILED_EVENTS",
    )
)


def import_nvml() -> ModuleType:
    """Import pynvml. Raises ToolMissing if it is not installed."""
    try:
        import pynvml
    except ImportError as error:
        raise ToolMissing("NVIDIA's GPUs need nvidia-ml-py", hint="pip install 'pitools-hpc[gpu]'") from error
    module: ModuleType = pynvml
    return module


def read_nvidia_gpus(library: ModuleType, devices: Sequence[PciDevice], query: Query) -> Iterator[Row]:
    """Yield the rows of table `gpus` that NVML has, and of those on the PCI bus that it should have and has not.

    Raises ClusterError if NVML cannot be used here, and no GPU of this node is to blame.
    """
    nvml = _Nvml(library)
    nvml.ask("nvmlInit")
    is_open = not nvml.error
    count = nvml.ask("nvmlDeviceGetCount") or 0 if is_open else 0
    init_error = nvml.error
    common: Row = {"vendor": "nvidia", "driver": _text(nvml.ask("nvmlSystemGetDriverVersion"))}
    known: set[Value] = set()
    nameless: list[Row] = []  # rows without an address, which NVML does not tell of a GPU that it cannot reach
    for index in range(count):
        row = {"index": index, **common}
        if str(index) in query.hung:
            nameless.append(row | {"responds": False, "error": "no answer within the time-out"})
            continue
        yield {**row, "responds": False}
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            row |= {key: value for key, value in _read_gpu(nvml, handle).items() if value is not None}
            row |= {"responds": not nvml.lost, "is_lost": bool(nvml.lost), "error": nvml.lost}
            known.add(row.get("pci"))
            if "pci" not in row:
                nameless.append(row)
            yield row
        elif nvml.code == _NO_PERMISSION:  # to be used by another job alone: neither well nor ill
            yield row | {"responds": None, "error": nvml.error}
        else:
            is_lost = True if nvml.code in _LOST else None
            nameless.append(row | {"responds": False, "is_lost": is_lost, "error": nvml.error})
    if is_open:
        nvml.ask("nvmlShutdown")
    missing = [one for one in devices if one.address not in known and _should_be_known(one, query.root)]
    if init_error and not missing:
        raise ClusterError(init_error, where="NVML")
    error = init_error or "not known to NVML"
    further = range(count, count + len(missing) - len(nameless))
    nameless += [{"index": index, **common, "responds": False, "error": error} for index in further]
    for row, device in zip_longest(nameless, missing[: len(nameless)]):  # NVML goes by addresses, too
        if device:
            row |= {"pci": device.address} | ({"is_lost": True} if pci_responds(device.folder) is False else {})
        yield row


def _should_be_known(device: PciDevice, root: Path) -> bool:
    """Return whether this process would be allowed to use a GPU: in a container or job it may have a part of them."""
    if not device.driver:
        return True
    info = read_text(root / "proc/driver/nvidia/gpus" / device.address / "information") or ""
    minor = next((line.split()[-1] for line in info.splitlines() if line.startswith("Device Minor:")), "")
    return bool(minor) and os.access(root / "dev" / f"nvidia{minor}", os.R_OK | os.W_OK)


class _Nvml:
    """NVML. error, code: of the last call. lost: why the GPU is out of use, if a call said that it is."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self.error = self.lost = ""
        self.code: int | None = None

    def ask(self, function: str, *arguments: object) -> Any:
        """Return what a function returns; None if it fails, or if this version of pynvml or the driver lacks it."""
        self.error, self.code = "", None
        try:
            return getattr(self._library, function)(*arguments)
        except Exception as error:  # noqa: BLE001 - of NVML or its wrapper, which also meets what it cannot decode
            self.error, self.code = str(error) or type(error).__name__, getattr(error, "value", None)
            if self.code in _LOST:
                self.lost = self.error
            return None

    def ask_first(self, *functions: str, handle: Any) -> Any:
        """Return the answer of the first function that answers."""
        return next((answer for name in functions if (answer := self.ask(name, handle)) is not None), None)

    def fill(self, struct: str, function: str, handle: Any) -> Any:
        """Return a structure that a function fills; None if it fails."""
        made = self.ask(struct)
        return made if made is not None and self.ask(function, handle, ctypes.byref(made)) is not None else None

    def fields(self, handle: Any, names: Sequence[str], scope: int | None = None) -> list[float | None]:
        """Return the values of fields, by the names of their constants."""
        numbers = {name: number for name in names if (number := getattr(self._library, name, None)) is not None}
        asked = [number if scope is None else (number, scope) for number in numbers.values()]
        answers = self.ask("nvmlDeviceGetFieldValues", handle, asked) if asked else None
        values = dict(zip(numbers, map(_field_value, answers or ()), strict=False))
        return [values.get(name) for name in names]


def _field_value(field: Any) -> float | None:
    if field.nvmlReturn or not 0 <= field.valueType < len(_FIELD_TYPES):
        return None
    value: float = getattr(field.value, _FIELD_TYPES[field.valueType])
    return value


def _read_gpu(nvml: _Nvml, handle: Any) -> Row:
    """Return what NVML says of a GPU."""
    nvml.lost = ""

    def ask(name: str, *arguments: object) -> Any:
        return nvml.ask(f"nvmlDeviceGet{name}", handle, *arguments)

    memory = ask("MemoryInfo", _MEMORY_V2) or ask("MemoryInfo")
    processes, mig, remapped = ask("ComputeRunningProcesses"), ask("MigMode"), ask("RemappedRows")
    memory_temperature, action = nvml.fields(handle, ("NVML_FI_DEV_MEMORY_TEMP", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"))
    slowdowns = nvml.ask_first(
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", handle=handle
    )
    sram = nvml.fill("c_nvmlEccSramErrorStatus_v1_t", "nvmlDeviceGetSramEccErrorStatus", handle)
    retired = [pages for cause in (0, 1) if (pages := ask("RetiredPages", cause)) is not None]
    temperature = ask("Temperature", 0)  # NVML_TEMPERATURE_GPU
    row: Row = {
        "uuid": _text(ask("UUID")),
        "serial": _text(ask("Serial")),
        "pci": _pci_address(ask("PciInfo")),
        "model": _text(ask("Name")),
        "vbios": _text(ask("VbiosVersion")),
        "is_persistent": _flag(ask("PersistenceMode")),
        "memory_bytes": memory.total if memory else None,
        "memory_used_bytes": memory.used if memory else None,
        "processes": len(processes) if processes is not None else None,
        "temperature_c": temperature if temperature is not None else ask("TemperatureV", 0),
        "memory_temperature_c": memory_temperature,
        "power_w": _thousandth(ask("PowerUsage")),
        "power_limit_w": _thousandth(ask("EnforcedPowerLimit")),
        "sm_clock_mhz": ask("ClockInfo", 1),  # NVML_CLOCK_SM
        "max_sm_clock_mhz": ask("MaxClockInfo", 1),
        "app_sm_clock_mhz": ask("ApplicationsClock", 1),
        "app_memory_clock_mhz": ask("ApplicationsClock", 2),  # NVML_CLOCK_MEM
        "slowdowns": None if slowdowns is None else _names_of_bits(slowdowns),
        "ecc_corrected": ask("TotalEccErrors", 0, 0),  # NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC
        "ecc_uncorrected": ask("TotalEccErrors", 1, 0),
        "ecc_uncorrected_total": ask("TotalEccErrors", 1, 1),
        "sram_threshold_exceeded": _flag(sram.bThresholdExceeded) if sram else None,
        "retired_pages": sum(map(len, retired)) if retired else None,
        "retired_pages_pending": _flag(ask("RetiredPagesPendingStatus")),
        "remapped_rows": remapped[1] if remapped else None,
        "remapped_rows_pending": _flag(remapped[2]) if remapped else None,
        "remap_failed": _flag(remapped[3]) if remapped else None,
        "pcie_generation": ask("CurrPcieLinkGeneration"),
        "max_pcie_generation": ask("MaxPcieLinkGeneration"),
        "pcie_width": ask("CurrPcieLinkWidth"),
        "max_pcie_width": ask("MaxPcieLinkWidth"),
        "pcie_replays": ask("PcieReplayCounter"),
        "recovery_action": None if action is None else _recovery_action(int(action)),
        "mig_mode": _flag(mig[0]) if mig else None,
    }
    return row | _read_nvlinks(nvml, handle) | _read_fabric(nvml, handle)


def _read_nvlinks(nvml: _Nvml, handle: Any) -> Row:
    (count,) = nvml.fields(handle, ("NVML_FI_DEV_NVLINK_LINK_COUNT",))
    if not count:
        return {}
    states = [nvml.ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(int(count))]
    counters = nvml.fields(handle, _NVLINK_TOTALS)
    if all(value is None for value in counters):
        counters = [value for link in range(int(count)) for value in nvml.fields(handle, _NVLINK_COUNTS, link)]
    values = [value for value in counters if value is not None]
    return {
        "nvlinks": sum(map(bool, states)) if any(state is not None for state in states) else None,
        "nvlink_errors": sum(values) if values else None,
    }


def _read_fabric(nvml: _Nvml, handle: Any) -> Row:
    info = nvml.fill("c_nvmlGpuFabricInfoV_t", "nvmlDeviceGetGpuFabricInfoV", handle)
    if info is None or info.state not in _FABRIC_STATES:
        return {}
    if info.state != _FABRIC_COMPLETED or info.status:
        return {"fabric_state": "failed" if info.status else _FABRIC_STATES[info.state]}
    # Two bits a problem: 1 is yes, 2 is no.
    problems = [name for number, name in enumerate(_FABRIC_PROBLEMS) if info.healthMask >> 2 * number & 3 == 1]
    domain = UUID(bytes=bytes(info.clusterUuid))
    return {
        "fabric_state": _FABRIC_STATES[info.state],
        "fabric_problems": ",".join(problems),
        "fabric_domain": f"{domain}/{info.cliqueId}" if domain.int else None,
    }


def _names_of_bits(bits: int) -> str:
    return ",".join(name for bit, name in _SLOWDOWNS.items() if bits & bit)


def _recovery_action(number: int) -> str:
    return _RECOVERY_ACTIONS[number] if 0 <= number < len(_RECOVERY_ACTIONS) else str(number)


def _pci_address(info: Any) -> str | None:
    """Return NVML's `00000000:B5:00.0` as the kernel has it, `0000:b5:00.0`."""
    domain, _, rest = (_text(info.busId) or "" if info else "").lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
