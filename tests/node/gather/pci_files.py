"""The files of a PCI device in sysfs."""

from __future__ import annotations


def pci(address: str, ids: str, kind: str, driver: str, **files: str | bytes) -> dict[str, str | bytes]:
    """Return the files of a device below /sys. ids, kind: as in `uevent`. files: others; `__` stands for `/`."""
    uevent = f"DRIVER={driver}\n" if driver else ""
    uevent += f"PCI_CLASS={kind}\nPCI_ID={ids}\nPCI_SLOT_NAME={address}"
    folder = f"bus/pci/devices/{address}"
    config = bytes.fromhex(ids.replace(":", "")) + bytes(60)
    return {f"{folder}/uevent": uevent, f"{folder}/config": config} | {
        f"{folder}/{name.replace('__', '/')}": text for name, text in files.items()
    }
