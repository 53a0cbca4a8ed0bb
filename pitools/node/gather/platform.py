"""Read the board and what it carries: CPUs, DIMMs, sensors, PCI devices, DMI, kernel modules, the BMC's event log."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError
from pitools.node.gather.read import (
    Query,
    list_names,
    read_bytes,
    read_int,
    read_measure,
    read_scaled,
    read_text,
    to_float,
    to_int,
)
from pitools.node.types import Row, Value

IPMI_TIMEOUT_S = 15.0
_IPMI_EVENTS = 200
_NUMBER = re.compile(r"\d+", re.ASCII)

# hwmon's prefix of a sensor's files: the kind, and what divides the file's number.
_SENSOR_KINDS = {"temp": ("temperature", 1e3), "in": ("voltage", 1e3), "fan": ("fan", 1), "power": ("power", 1e6)}
_SENSOR_INPUT = re.compile(r"((temp|in|fan|power)\d+)_(input|average)", re.ASCII)
_ALARMS = ("alarm", "crit_alarm", "lcrit_alarm", "emergency_alarm", "max_alarm", "min_alarm", "cap_alarm")


class PciDevice(NamedTuple):
    """A device of the PCI bus. driver: "" if none is bound. folder: of its files in sysfs."""

    address: str
    vendor: str
    device: str
    kind: str
    driver: str
    folder: str


def require_sysfs(sys: Path) -> None:
    """Raise OSError if /sys is not mounted: a folder that is not there then does not mean that there is no device."""
    (sys / "class").stat()


def read_cpus(query: Query) -> Iterator[Row]:
    """Yield the rows of table `cpus`; those of a virtual machine have no limits."""
    folder = f"{query.sys}/devices/system/cpu"
    mhz: dict[int, float | None] | None = None
    for number in sorted(int(name[3:]) for name in os.listdir(folder) if re.fullmatch(r"cpu\d{1,6}", name, re.ASCII)):
        cpu = f"{folder}/cpu{number}"
        current = read_scaled(f"{cpu}/cpufreq/scaling_cur_freq", 1000)
        if current is None:
            mhz = _cpuinfo_mhz(query.proc) if mhz is None else mhz
            current = mhz.get(number)
        yield {
            "cpu": number,
            "governor": read_text(f"{cpu}/cpufreq/scaling_governor", limit=64),
            "mhz": current,
            "max_mhz": read_scaled(f"{cpu}/cpufreq/cpuinfo_max_freq", 1000),
            "limit_mhz": read_scaled(f"{cpu}/cpufreq/scaling_max_freq", 1000),
            "throttled": read_int(f"{cpu}/thermal_throttle/core_throttle_count"),
            "package_throttled": read_int(f"{cpu}/thermal_throttle/package_throttle_count"),
        }


def _cpuinfo_mhz(proc: Path) -> dict[int, float | None]:
    found: dict[int, float | None] = {}
    number = None
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            number = to_int(value)
        elif name.strip() == "cpu MHz" and number is not None:
            found[number] = to_float(value)
    return found


def read_dimms(query: Query) -> Iterator[Row]:
    """Yield the rows of table `dimms`, which the kernel's EDAC drivers fill; none without one."""
    folder = f"{query.sys}/devices/system/edac/mc"
    require_sysfs(query.sys)
    for controller in list_names(folder):
        for slot in list_names(f"{folder}/{controller}"):
            if re.fullmatch(r"(dimm|rank)\d+", slot, re.ASCII):
                path = f"{folder}/{controller}/{slot}"
                mib = read_int(f"{path}/size")
                yield {
                    "dimm": f"{controller}/{slot}",
                    "label": read_text(f"{path}/dimm_label"),
                    "size_bytes": None if mib is None else mib << 20,
                    "corrected": read_int(f"{path}/dimm_ce_count"),
                    "uncorrected": read_int(f"{path}/dimm_ue_count"),
                }
        # Only if there are any: a check that counts modules should not count this row.
        lost = [read_int(f"{folder}/{controller}/{name}_noinfo_count") for name in ("ce", "ue")]
        if any(lost):
            name = f"{controller}/unknown"
            yield {"dimm": name, "label": "", "size_bytes": None, "corrected": lost[0], "uncorrected": lost[1]}


def read_sensors(query: Query) -> Iterator[Row]:
    """Yield the rows of table `sensors`, from hwmon. Chips of a name are numbered in the order of their devices."""
    root = f"{query.sys}/class/hwmon"
    require_sysfs(query.sys)
    # The number of hwmonN depends on the order in which drivers load; the device's path does not.
    chips = sorted((os.path.realpath(f"{root}/{name}"), name) for name in list_names(root))
    numbers: Counter[str] = Counter()
    for path, folder in chips:
        chip = read_text(f"{path}/name", limit=64) or read_text(f"{path}/device/name", limit=64) or folder
        number, numbers[chip] = numbers[chip], numbers[chip] + 1
        names = set(list_names(path))
        inputs = {match[1]: match for name in sorted(names) if (match := _SENSOR_INPUT.fullmatch(name))}
        labels: set[str] = set()
        for sensor in sorted(inputs, key=lambda name: (name.rstrip("0123456789"), int(_NUMBER.findall(name)[0]))):
            kind, divisor = _SENSOR_KINDS[inputs[sensor][2]]
            label = (read_text(f"{path}/{sensor}_label", limit=64) if f"{sensor}_label" in names else "") or sensor
            label = sensor if label in labels else label
            labels.add(label)
            alarms = [read_int(f"{path}/{name}") for end in _ALARMS if (name := f"{sensor}_{end}") in names]
            yield {
                "sensor": f"{chip}-{number}/{label}",
                "value": read_scaled(f"{path}/{inputs[sensor][0]}", divisor),
                "kind": kind,
                "critical": read_scaled(f"{path}/{sensor}_crit", divisor),
                "has_alarm": any(alarms) if any(alarm is not None for alarm in alarms) else None,
            }


def list_pci_devices(sys: Path) -> list[PciDevice]:
    """Return the devices of the PCI bus, by address. Raises OSError if the node has none, or /sys is not mounted."""
    devices = []
    for address in sorted(os.listdir(sys / "bus/pci/devices")):
        folder = f"{sys}/bus/pci/devices/{address}"
        # One file has what vendor, device, class and driver have in four.
        lines = (read_text(f"{folder}/uevent") or "").splitlines()
        values = dict(line.partition("=")[::2] for line in lines)
        vendor, _, device = values.get("PCI_ID", "").lower().partition(":")
        kind = values.get("PCI_CLASS", "").lower().zfill(6)
        devices.append(
            PciDevice(address, f"0x{vendor}", f"0x{device}", f"0x{kind}", values.get("DRIVER", ""), folder),
        )
    return devices


def read_pci_devices(query: Query) -> Iterator[Row]:
    """Yield the rows of table `pci_devices`."""
    for one in list_pci_devices(query.sys):
        yield {
            "pci": one.address,
            "vendor": one.vendor,
            "device": one.device,
            "kind": one.kind,
            "driver": one.driver,
            "responds": pci_responds(one.folder),
            **pci_link(one.folder),
            "fatal_errors": _aer_total(f"{one.folder}/aer_dev_fatal"),
            "nonfatal_errors": _aer_total(f"{one.folder}/aer_dev_nonfatal"),
            "corrected_errors": _aer_total(f"{one.folder}/aer_dev_correctable"),
        }


def pci_responds(folder: str) -> bool | None:
    """Return whether a device answers on the bus: all ones are what the bridge says for one that does not."""
    head = read_bytes(f"{folder}/config", limit=4)
    return None if head is None or len(head) < 4 else head != b"\xff\xff\xff\xff"


def pci_link(folder: str) -> dict[str, Value]:
    """Return the speeds and widths of a device's PCIe link. What has no link, as a virtual function, has None or 0."""
    return {
        "link_gts": read_measure(f"{folder}/current_link_speed"),
        "max_link_gts": read_measure(f"{folder}/max_link_speed"),
        "link_width": read_int(f"{folder}/current_link_width") or None,
        "max_link_width": read_int(f"{folder}/max_link_width") or None,
    }


def _aer_total(path: str) -> int | None:
    """Return the last line's number, as of `TOTAL_ERR_FATAL 0`."""
    name, _, number = (read_text(path) or "").rpartition("\n")[2].partition(" ")
    return to_int(number) if name.startswith("TOTAL_ERR") else None


def read_dmi(query: Query) -> Iterator[Row]:
    """Yield the rows of table `dmi`; serial numbers can be read by root alone."""
    folder = f"{query.sys}/class/dmi/id"
    for name in list_names(folder):
        if name not in ("uevent", "modalias", "power", "subsystem"):
            yield {"key": name, "value": read_text(f"{folder}/{name}")}


def read_modules(query: Query) -> Iterator[Row]:
    """Yield the rows of table `modules`: the loaded ones."""
    for line in (query.proc / "modules").read_text(errors="replace").splitlines():
        if name := line.partition(" ")[0]:
            yield {"module": name, "version": read_text(f"{query.sys}/module/{name}/version", limit=256)}


def read_ipmi_events(_query: Query) -> Iterator[Row]:
    """Yield the rows of table `ipmi_events`, the newest of them.

    Raises ToolMissing without ipmitool, ClusterError if the BMC cannot be asked.
    """
    # Not `elist`: it reads the records of all sensors first, which takes a minute on some BMCs.
    done = subprocesses.run(["ipmitool", "sel", "list", "last", str(_IPMI_EVENTS)], timeout_s=IPMI_TIMEOUT_S)
    if done.code:
        problem = done.stderr.strip().partition("\n")[0] or f"exited with code {done.code}"
        raise ClusterError(problem, where="ipmitool sel list", hint="is there a BMC, and /dev/ipmi0?")
    yield from parse_ipmi_events(done.stdout)


def parse_ipmi_events(text: str) -> Iterator[Row]:
    """Yield the events of `ipmitool sel list`: `  12 | 07/17/2026 | 15:50:36 | Power Supply #0x75 | ... | Asserted`."""
    for line in text.splitlines():
        number, *fields = (field.strip() for field in line.split("|"))
        if re.fullmatch(r"[0-9a-fA-F]{1,8}", number) and len(fields) >= 3:
            # An event before the BMC's clock was set has one field, `Pre-Init`, and the seconds since its start.
            yield {
                "event": int(number, 16),
                "at": _ipmi_time(fields[0], fields[1]),
                "sensor": fields[2],
                "text": " | ".join(fields[3:]),
            }


def _ipmi_time(date: str, time: str) -> str | None:
    for form in ("%m/%d/%Y %H:%M:%S", "%m/%d/%y %H:%M:%S"):
        try:
            return timestamps.to_rfc3339(datetime.strptime(f"{date} {time[:8]}", form).replace(tzinfo=UTC))
        except ValueError:
            continue
    return None
