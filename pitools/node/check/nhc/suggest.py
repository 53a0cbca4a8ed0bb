"""The values of a line of which no check is made, for the check that a site writes instead."""

from __future__ import annotations

import re
from typing import Any

from pitools.node.check.nhc.match import UnsupportedError, count_of, option_values, options_of

_DMI_KEYS = {
    "BIOS Information: Vendor": "bios_vendor",
    "BIOS Information: Version": "bios_version",
    "BIOS Information: Release Date": "bios_date",
    "System Information: Manufacturer": "sys_vendor",
    "System Information: Product Name": "product_name",
    "Base Board Information: Manufacturer": "board_vendor",
    "Base Board Information: Product Name": "board_name",
}
_ANY_ADDRESS = ("", "0.0.0.0", "*", "::", "[::]")  # noqa: S104 - nothing is bound


def values_of(name: str, arguments: list[str]) -> dict[str, Any]:
    """Return the fields that a line's arguments give; none if they are not understood."""
    try:
        if name == "check_ps_kswapd":
            return {"max": count_of(arguments[0])}
        if name == "check_net_socket":
            pairs, _rest = options_of([one for one in arguments if one != "-!"], "0an:p:s:l:r:t:u:d:e:E:")
            address, _colon, port = [*option_values(pairs, "l"), *option_values(pairs, "r")][0].rpartition(":")
            host = "127.0.0.1" if address in _ANY_ADDRESS else address
            return {"where": {"endpoint": f"tcp://{host}:{int(port)}"}}
        if name == "check_dmi_data_match":
            key, _colon, value = arguments[-1].rpartition(": ")
            return {"where": {"key": _DMI_KEYS[key]}, "equals": value}
        if name == "check_dmi_raw_data_match":
            return {"pattern": f"(?s).*{re.escape(arguments[-1])}.*"}
    except (UnsupportedError, LookupError, ValueError):
        pass
    return {}
