"""Values of a policy that Slurm would keep otherwise than they are written are refused, or made what it keeps."""

from __future__ import annotations

import pytest

from pitools.core.errors import UsageError
from pitools.tenancy.columns import QOS, TomlValue, from_toml

COLUMNS = {column.key: column for column in QOS}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("max_wall", "90s", None),
        ("grp_wall", "00:01:30", None),
        ("max_wall", "120s", "00:02:00"),
        ("preempt_exempt_time", "90s", "00:01:30"),
        ("grace_time", "90s", "00:01:30"),
        ("max_tres", {"cpu": "1.5"}, None),
        ("max_tres", {"mem": "1.5"}, None),
        ("max_tres", {"gres/gpu": "4K", "mem": "1.5G", "bb/x": "1G"}, "bb/x=1G,gres/gpu=4096,mem=1536M"),
    ],
)
def test_value_comes_back_as_it_is_set(key: str, value: TomlValue, text: str | None) -> None:
    """Slurm rounds the seconds of wall times up to minutes, and counts what is no memory in whole numbers."""
    if text is None:
        with pytest.raises(UsageError):
            from_toml(COLUMNS[key], value)
    else:
        assert from_toml(COLUMNS[key], value) == text
