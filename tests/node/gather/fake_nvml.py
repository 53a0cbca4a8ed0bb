"""A stand-in for pynvml: it answers as NVML's documentation says that an H100 does, and fails where it is told to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ERRORS = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    18: "Driver/library version mismatch",
    999: "Unknown Error",
}
MISSING = -1  # pynvml has no such function


class NVMLError(Exception):
    """As pynvml's: the code is in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(ERRORS[value])
        self.value = value


class SramStatus(ctypes.Structure):
    """What is read of c_nvmlEccSramErrorStatus_v1_t."""

    _fields_ = [("bThresholdExceeded", ctypes.c_uint)]


class FabricInfo(ctypes.Structure):
    """What is read of c_nvmlGpuFabricInfoV_t."""

    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]


FIELD_IDS = {
    "MEMORY_TEMP": 82,
    "GET_GPU_RECOVERY_ACTION": 230,
    "NVLINK_LINK_COUNT": 91,
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 38,
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 45,
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": 52,
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 59,
    "NVLINK_COUNT_RCV_ERRORS": 208,
    "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": 214,
}


def h100(index: int) -> dict[str, Any]:
    """Return the answers of a GPU by function, without the prefix nvmlDeviceGet."""
    return {
        "UUID": f"GPU-{index:08x}-1111-2222-3333-444455556666",
        "Serial": f"165492200000{index}",
        "PciInfo": SimpleNamespace(busId=f"00000000:{0x10 + index:02X}:00.0"),
        "Name": "NVIDIA H100 80GB HBM3",
        "VbiosVersion": "96.00.89.00.01",
        "PersistenceMode": 1,
        "MemoryInfo": SimpleNamespace(total=85520809984, used=4 << 20),
        "ComputeRunningProcesses": [SimpleNamespace(pid=4711)],
        "Temperature": 34,
        "PowerUsage": 71500,
        "EnforcedPowerLimit": 700000,
        "ClockInfo": 345,
        "MaxClockInfo": 1980,
        "ApplicationsClock": lambda kind: {1: 1980, 2: 2619}[kind],
        "CurrentClocksEventReasons": 0x1 | 0x4 | 0x40,
        "TotalEccErrors": lambda kind, counter: {(0, 0): 3, (1, 0): 1, (1, 1): 2}[kind, counter],
        "SramEccErrorStatus": lambda status: setattr(status._obj, "bThresholdExceeded", 1) or 0,
        "RetiredPages": lambda cause: [0x1000] if cause else [],
        "RetiredPagesPendingStatus": 0,
        "RemappedRows": (4, 5, 1, 0),
        "CurrPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "PcieReplayCounter": 7,
        "MigMode": [0, 0],
        "NvLinkState": lambda link: int(link != 17),
        "GpuFabricInfoV": _fill_fabric,
        "fields": {
            82: 45,
            230: 4,
            91: 18,
            38: 0,
            45: 2,
            52: 1,
            59: 0,
        },
    }


def _fill_fabric(info: Any) -> int:
    info._obj.state, info._obj.cliqueId, info._obj.healthMask = 3, 6, 0b10_10_10_01
    info._obj.clusterUuid[:] = list(range(16))
    return 0


H100_ROW = {
    "vendor": "nvidia",
    "driver": "570.86.15",
    "responds": True,
    "is_lost": False,
    "error": "",
    "model": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.89.00.01",
    "is_persistent": True,
    "memory_bytes": 85520809984,
    "memory_used_bytes": 4 << 20,
    "processes": 1,
    "temperature_c": 34,
    "memory_temperature_c": 45,
    "power_w": 71.5,
    "power_limit_w": 700.0,
    "sm_clock_mhz": 345,
    "max_sm_clock_mhz": 1980,
    "app_sm_clock_mhz": 1980,
    "app_memory_clock_mhz": 2619,
    "slowdowns": "SwPowerCap,HwThermalSlowdown",
    "ecc_corrected": 3,
    "ecc_uncorrected": 1,
    "ecc_uncorrected_total": 2,
    "sram_threshold_exceeded": True,
    "retired_pages": 1,
    "retired_pages_pending": False,
    "remapped_rows": 5,
    "remapped_rows_pending": True,
    "remap_failed": False,
    "pcie_generation": 5,
    "max_pcie_generation": 5,
    "pcie_width": 16,
    "max_pcie_width": 16,
    "pcie_replays": 7,
    "recovery_action": "drain-and-reset",
    "mig_mode": False,
    "nvlinks": 17,
    "nvlink_errors": 3,
    "fabric_state": "completed",
    "fabric_problems": "degraded-bandwidth",
    "fabric_domain": "00010203-0405-0607-0809-0a0b0c0d0e0f/6",
}


class FakeNvml:
    """The module. fails: by function and GPU (None for all), the code of its error. calls: functions, in order."""

    c_nvmlEccSramErrorStatus_v1_t = SramStatus
    c_nvmlGpuFabricInfoV_t = FabricInfo
    NVMLError = NVMLError

    def __init__(self, gpus: list[dict[str, Any]], fails: dict[tuple[str, int | None], int] | None = None) -> None:
        self.gpus, self.fails = gpus, fails or {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_FI_DEV_") and name.removeprefix("NVML_FI_DEV_") in FIELD_IDS:
            return FIELD_IDS[name.removeprefix("NVML_FI_DEV_")]
        if not name.startswith("nvml") or self.fails.get((name, None)) == MISSING:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        gpu = arguments[0] if arguments else None
        if code := self.fails.get((name, gpu), self.fails.get((name, None), 0)):
            raise AttributeError(name) if code == MISSING else NVMLError(code)
        if name in ("nvmlInit", "nvmlShutdown"):
            return None
        if name == "nvmlSystemGetDriverVersion":
            return "570.86.15"
        if name == "nvmlDeviceGetCount":
            return len(self.gpus)
        if name == "nvmlDeviceGetHandleByIndex":
            return gpu
        answers = self.gpus[arguments[0]]
        if name == "nvmlDeviceGetFieldValues":
            return [self._field(answers["fields"], one) for one in arguments[1]]
        if (answer := answers.get(name.removeprefix("nvmlDeviceGet"))) is None:
            raise NVMLError(3)
        return answer(*arguments[1:]) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]

    def _field(self, values: dict[Any, float], number: Any) -> Any:
        value = values.get(number)
        return SimpleNamespace(
            nvmlReturn=3 if value is None else 0, valueType=3, value=SimpleNamespace(ullVal=value or 0)
        )
