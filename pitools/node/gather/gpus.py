"""Read the accelerators of the node, by what is on its PCI bus: NVIDIA's GPUs, AMD's, Google's TPUs, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pitools.node.gather.network import link_name
from pitools.node.gather.nvidia import import_nvml, read_nvidia_gpus
from pitools.node.gather.platform import PciDevice, list_pci_devices, pci_link, pci_responds
from pitools.node.gather.read import Query, list_names, read_int, read_scaled, read_text, to_int
from pitools.node.types import Row

GPU_TIMEOUT_S = 15.0  # a driver without persistence mode starts each GPU first
_NVIDIA, _AMD, _GOOGLE = "0x10de", "0x1002", "0x1ae0"
_DISPLAYS = ("0x0300", "0x0302", "0x0380")  # VGA, 3D, other
_PROCESSING = "0x1200"
_TPUS = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # of PCIe, by GT/s


def read_gpus(query: Query) -> Iterator[Row]:
    """Yield the rows of table `gpus`: accelerators that a driver of this node has, or that no driver is bound to.

    One that is handed to a virtual machine (vfio-pci) is none of this node's, but TPUs are used that way.
    Raises ToolMissing if there are NVIDIA's GPUs and no pynvml, ClusterError if NVML cannot be used.
    """
    devices = list_pci_devices(query.sys)
    nvidia = [one for one in devices if one.vendor == _NVIDIA and _is_gpu(one) and one.driver in ("nvidia", "")]
    amd = [one for one in devices if one.vendor == _AMD and _is_gpu(one) and one.driver in ("amdgpu", "")]
    tpus = [one for one in devices if one.vendor == _GOOGLE and one.device in _TPUS]
    count = 0
    if nvidia:
        numa_nodes = {one.address: read_int(f"{one.folder}/numa_node") for one in nvidia}
        for row in read_nvidia_gpus(import_nvml(), nvidia, query):
            count = max(count, int(row["index"] or 0) + 1)
            yield row | {"numa_node": numa_nodes.get(str(row.get("pci")))}
    smi = _Amdsmi(_import_amdsmi() if amd else None)
    for index, (vendor, device) in enumerate([("amd", one) for one in amd] + [("google", one) for one in tpus], count):
        if str(index) in query.hung:
            continue
        row = {
            "index": index,
            "pci": device.address,
            "vendor": vendor,
            "numa_node": read_int(f"{device.folder}/numa_node"),
        }
        yield row | {"responds": False}
        error = _error(device)
        is_lost = pci_responds(device.folder) is False
        row |= {"responds": not error, "is_lost": is_lost, "error": error, **_read_pcie(device.folder)}
        if vendor == "google":
            row |= {"model": _TPUS[device.device], "driver": device.driver}
            if not error and (error := _tpu_error(device, query.root / "dev")):
                row |= {"responds": None, "error": error}
        elif not error:
            row |= _read_amd_gpu(device.folder, query.sys) | smi.values(device.address)
        yield row


def _is_gpu(device: PciDevice) -> bool:
    if os.path.lexists(f"{device.folder}/physfn"):  # a virtual function is for a virtual machine
        return False
    return device.kind[:6] in _DISPLAYS or (device.vendor == _AMD and device.kind[:6] == _PROCESSING)


def _error(device: PciDevice) -> str:
    if pci_responds(device.folder) is False:
        return "fell off the PCI bus"
    return "" if device.driver else "no driver is bound"


def _read_pcie(folder: str) -> Row:
    link = pci_link(folder)
    return {
        "pcie_generation": _GENERATIONS.get(link["link_gts"]),  # type: ignore[arg-type]
        "max_pcie_generation": _GENERATIONS.get(link["max_link_gts"]),  # type: ignore[arg-type]
        "pcie_width": link["link_width"],
        "max_pcie_width": link["max_link_width"],
    }


def _read_amd_gpu(folder: str, sys: Path) -> Row:
    """Return what amdgpu says of a GPU in sysfs."""
    # `0x027f5d43 : 0x00001000 : R`: R is retired, P pending, F could not be retired.
    bad_pages = read_text(f"{folder}/ras/gpu_vram_bad_pages")
    pages = None if bad_pages is None else [line.rpartition(":")[2].strip() for line in bad_pages.splitlines()]
    corrected, uncorrected = _ras_errors(f"{folder}/ras")
    return {
        "uuid": read_text(f"{folder}/unique_id", limit=64),
        "serial": read_text(f"{folder}/serial_number", limit=64) or read_text(f"{folder}/unique_id", limit=64),
        "model": read_text(f"{folder}/product_name", limit=256),
        "driver": read_text(sys / "module/amdgpu/version", limit=64) or "",
        "vbios": read_text(f"{folder}/vbios_version", limit=64),
        "memory_bytes": read_int(f"{folder}/mem_info_vram_total"),
        "memory_used_bytes": read_int(f"{folder}/mem_info_vram_used"),
        **_amd_sensors(f"{folder}/hwmon"),
        "ecc_corrected": corrected,
        "ecc_uncorrected": uncorrected,
        "retired_pages": None if pages is None else len(pages),
        "retired_pages_pending": None if pages is None else "P" in pages,
        "remap_failed": None if pages is None else "F" in pages,
        "pcie_replays": read_int(f"{folder}/pcie_replay_count"),
    }


def _ras_errors(folder: str) -> tuple[int | None, int | None]:
    """Return the corrected and uncorrected errors of all blocks of a GPU: `ue: 0` and `ce: 0` in a file of each."""
    sums: dict[str, int] = {}
    for name in list_names(folder):
        if name.endswith("_err_count"):
            for line in (read_text(f"{folder}/{name}") or "").splitlines():
                kind, _, number = line.partition(":")
                if (count := to_int(number)) is not None:
                    sums[kind.strip()] = sums.get(kind.strip(), 0) + count
    return sums.get("ce"), sums.get("ue")


def _amd_sensors(folder: str) -> Row:
    """Return temperatures, power and clock: the files of hwmon are labelled edge, junction, mem, sclk, mclk."""
    for name in list_names(folder):
        hwmon = f"{folder}/{name}"
        labels = {
            read_text(f"{hwmon}/{one}_label", limit=64): one for one in ("temp1", "temp2", "temp3", "freq1", "freq2")
        }
        core = labels.get("junction") or labels.get("edge")
        power = read_scaled(f"{hwmon}/power1_average", 1e6)
        return {
            "temperature_c": read_scaled(f"{hwmon}/{core}_input", 1e3),
            "memory_temperature_c": read_scaled(f"{hwmon}/{labels.get('mem')}_input", 1e3),
            "power_w": read_scaled(f"{hwmon}/power1_input", 1e6) if power is None else power,
            "power_limit_w": read_scaled(f"{hwmon}/power1_cap", 1e6),
            "sm_clock_mhz": read_scaled(f"{hwmon}/{labels.get('sclk')}_input", 1e6),
        }
    return {}


def _tpu_error(device: PciDevice, dev: Path) -> str:
    """Return why this process may not use a TPU, as in a container: it is /dev/accelN, or a group of vfio since v5e."""
    group = link_name(f"{device.folder}/iommu_group")
    nodes = [dev / name for name in list_names(f"{device.folder}/accel")] + ([dev / "vfio" / group] if group else [])
    return f"no {' or '.join(map(str, nodes))}" if nodes and not any(map(os.path.exists, nodes)) else ""


def _import_amdsmi() -> ModuleType | None:
    """Import amdsmi, which comes with ROCm; None if it is not there or finds no library."""
    try:
        import amdsmi
    except Exception:  # noqa: BLE001 - it loads its library when it is imported, and raises what it likes
        return None
    module: ModuleType = amdsmi
    return module


class _Amdsmi:
    """What amdsmi says beyond sysfs, by PCI address; nothing where it fails."""

    def __init__(self, library: ModuleType | None) -> None:
        self._library = library
        self._handles: dict[str, object] = {}
        if library is not None:
            self._ask("amdsmi_init")
            for handle in self._ask("amdsmi_get_processor_handles") or ():
                self._handles[str(self._ask("amdsmi_get_gpu_device_bdf", handle)).lower()] = handle

    def values(self, address: str) -> Row:
        """Return the name of the model and the number of processes, where amdsmi knows them."""
        if (handle := self._handles.get(address)) is None:
            return {}
        asic = self._ask("amdsmi_get_gpu_asic_info", handle) or {}
        processes = self._ask("amdsmi_get_gpu_process_list", handle)
        row = {"model": asic.get("market_name"), "processes": None if processes is None else len(processes)}
        return {key: value for key, value in row.items() if value not in (None, "")}

    def _ask(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except Exception:  # noqa: BLE001 - of its library, in one of many classes
            return None
