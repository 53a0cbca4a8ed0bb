"""The configuration of NHC is read as NHC reads it, as far as checks can be made of its lines."""

from __future__ import annotations

import random
import re
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.node.check.config import checks_for, load_config
from pitools.node.check.nhc import lines
from pitools.node.check.nhc.lines import NhcLine, line_rows, parse_nhc
from pitools.node.check.nhc.match import (
    UnsupportedError,
    above_regex,
    count_of,
    is_target,
    limits_of,
    match_regex,
    size_bytes,
)
from pitools.node.check.nhc.system import CONVERTERS
from pitools.node.check.problems import check_problem

CONF = r"""
# Cluster-wide checks of NHC
      * || export TIMEOUT=15 NHC_CHECK_ALL=1
      * || MAX_SYS_UID=499
      * || SCRATCH="/scratch"

# Hardware
{gpu[01-16]}   || check_hw_cpuinfo 2 96 192     # both sockets
{gpu[01-16]}   || check_hw_physmem 1915071MB 1915071MB 5%
/^gpu0[1-8]$/  || check_hw_ib 400 mlx5_ib0:1
!gpu*          || check_hw_eth eth0

# File systems
* || check_fs_mount_rw -t nfs -s '/^nas[12]:/' -f ${SCRATCH}
* || check_fs_mount_rw / rootfs '/^(ext4|xfs)$/'
* || check_fs_free $SCRATCH 5%
gpu01 || check_file_contents /etc/slurm/gres.conf \
         '/^AutoDetect=nvml$/' '!*Count=7*'

# Processes
* || check_ps_service -u root -r -d rpc.statd nfslock
* || check_ps_loadavg $((2*HW_CORES))
* || check_ps_cpu -0 -u !root 99%
* || check_ps_unauth_user log
* || check_hw_gm myri0
* || test -d /scratch && check_fs_free /scratch 1%
{gpu[01-08,12]} || check_hw_eth eth9
check_hw_eth eth0
"""


def read(host: str, text: str = CONF) -> dict[str, NhcLine]:
    """Return the lines of a host by the text of their command."""
    return {line.text.partition("||")[2].strip(): line for line in parse_nhc(text, host)}


def names(lines: dict[str, NhcLine]) -> set[str]:
    return {check.name for line in lines.values() for check in line.checks}


def test_lines_are_for_the_hosts_that_they_name() -> None:
    """Globs, regular expressions, ranges and their opposites choose the lines of a host."""
    of_all = {
        *("nhc-fs-mount-rw-scratch", "nhc-fs-mount-rw-scratch-type", "nhc-fs-mount-rw-scratch-device"),
        *("nhc-fs-mount-rw-scratch-options", "nhc-fs-mount-rw-root", "nhc-fs-mount-rw-root-device"),
        *("nhc-fs-mount-rw-root-type", "nhc-fs-mount-rw-root-options", "nhc-fs-free-scratch", "nhc-ps-cpu-root"),
        *("nhc-ps-service-nfslock",),
    }
    of_gpus = {"nhc-hw-cpuinfo-sockets", "nhc-hw-cpuinfo-cores", "nhc-hw-cpuinfo-cpus", "nhc-hw-physmem"}
    file = "nhc-file-contents-etc-slurm-gres-conf"
    of_first = {f"{file}-exists", f"{file}-text", f"{file}-text-2"}
    assert names(read("gpu01")) == of_all | of_gpus | of_first | {"nhc-hw-ib-mlx5-ib0-1"}
    assert names(read("gpu09")) == of_all | of_gpus
    assert names(read("login1")) == of_all | {"nhc-hw-eth-eth0"}


def test_lines_that_are_not_taken_say_where_and_why() -> None:
    """What needs a shell, is no check, or no target is reported with its line; the others are taken."""
    found = [line for line in parse_nhc(CONF, "gpu01") if not line.is_setting and "other nodes" not in line.note]
    numbers = dict(enumerate(CONF.splitlines(), 1))
    for line in found:
        assert numbers[line.line].split("||")[0].strip() == line.text.split("||")[0].strip()
    refused = [line for line in found if not line.checks]
    assert len(refused) == 6
    reasons = "\n".join(line.note for line in refused)
    for part in (
        "shell expression",
        "check_ps_unauth_users",
        "Myrinet",
        "more than one",
        "range",
        "has no ||",
    ):
        assert part in reasons
    (service,) = (line for line in found if "nfslock" in line.text)
    assert service.checks
    assert service.note  # it is not started


def test_a_backslash_continues_a_line_as_for_the_shell() -> None:
    """Within a word, too, and a comment: NHC reads its file so."""
    text = "n1 || check_hw_e\\\nth a\\\n1\n# of old: \\\nn1 || check_hw_eth b\n# two: \\\\\nn1 || check_hw_eth c\\"
    assert [(line.line, line.text) for line in parse_nhc(text, "n1")] == [
        (1, "n1 || check_hw_eth a1"),
        (7, "n1 || check_hw_eth c"),
    ]


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    """Quotes, comments, backslashes and variables mean what they mean for NHC, or the line is not taken."""
    dice = random.Random(7)
    signs = [
        "\\",
        "\\\\",
        "'",
        '"',
        "#",
        " ",
        "a",
        "/",
        "{",
        "}",
        ",",
        "..",
        "~",
        "$",
        "!",
        "*",
        "[",
        "=",
        "$A",
        "${A}",
        ";",
        ">",
    ]
    texts = [f"a{''.join(dice.choices(signs, k=6))} z" for _ in range(3000)]
    texts = [text for text in texts if not ("A" in text and re.search(r"\$(?![A{])", text))]  # bash splits no such word
    taken: dict[str, list[str]] = {}
    for text in texts:
        _, line = parse_nhc(f"* || A='x y'\n* || check_file_contents /f {text}", "n1")
        if line.checks:
            taken[text] = [check.pattern for check in line.checks[1:]]
    assert len(taken) > 500
    script = r"""
    set -f; A='x y'
    while read LINE; do
        eval "set -- ${LINE#*||}"
        for word in "$@"; do printf '%s\0' "$word"; done; printf '\0'
    done"""
    bash = subprocess.run(
        ["bash", "-c", script],
        input="".join(f"||{text}\n" for text in taken),
        text=True,
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    assert bash.stderr == ""
    for (text, patterns), words in zip(taken.items(), bash.stdout.split("\0\0"), strict=False):
        assert patterns == [match_regex(word, of_line=True) for word in words.split("\0")], text


@pytest.mark.parametrize(
    "text",
    [
        "check_file_test -e /dev/nvidia{0..7}",
        "check_file_test -e /{a,b}",
        "check_cmd_status ls / 2>/dev/null",
        "check_cmd_status ls />/dev/null",
        "check_cmd_status a&&b",
        "check_hw_eth eth0;reboot",
        "check_fs_mount_rw -f ${SCRATCH:-/scratch}",
        "check_fs_free ~ 5%",
        "check_file_test -e /dev/nvidia*",
        "check_ps_userproc_lineage -p 17 die",
        "check_ps_cpu -u 999 99%",
        "check_ps_daemon kworker",
        "check_cmd_status type srun",
        "check_cmd_status check_hw_eth eth0",
    ],
)
def test_what_the_shell_would_expand_is_not_taken(text: str) -> None:
    """A line of it would ask for a file `nvidia{0..7}`, and drain each node."""
    (line,) = parse_nhc(f"* || {text}", "n1")
    assert line.checks == ()
    assert line.note


def test_a_time_out_beyond_ours_is_said() -> None:
    """A command is ended after 10 s: one that takes longer is unknown for ever."""
    notes = [line.note for line in parse_nhc("* || check_cmd_status -t 20 a\n* || check_cmd_status -t 10 a", "n1")]
    assert [bool(note) for note in notes] == [True, False]


def test_uids_of_the_system_are_those_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UID_MIN of login.defs, where the file sets no MAX_SYS_UID."""
    (tmp_path / "login.defs").write_text("# UID_MIN 1\nUID_MIN\t\t  5000\nUID_MAX 60000\n")
    monkeypatch.setattr(lines, "_LOGIN_DEFS", tmp_path / "login.defs")
    (tmp_path / "nhc.conf").write_text("* || check_ps_cpu 99%\n* || MAX_SYS_UID=499\n* || check_ps_cpu 99%")
    uids = [check.where["uid"] for line in lines.read_nhc(tmp_path / "nhc.conf", "n1") for check in line.checks]
    assert uids == [f"re:{above_regex(5000)}", f"re:{above_regex(499)}"]


def test_settings_say_what_they_do(tmp_path: Path) -> None:
    """Those without a use, too, whose sense is kept by other means; and lines for other nodes are told as such."""
    text = "* || export TIMEOUT=15 NHC_CHECK_ALL=1\n* || MARK_OFFLINE=0\n* || MAX_SYS_UID=499 X=1\n*||\nn2 || X=1"
    notes = {line.line: line.note for line in parse_nhc(text, "n1")}
    assert [(line, note.count("not used")) for line, note in notes.items()] == [(1, 2), (2, 0), (3, 0), (5, 0)]
    for number, part in {2: "MARK_OFFLINE", 3: "MAX_SYS_UID", 5: "other nodes"}.items():
        assert part in notes[number]
    (tmp_path / "nhc.conf").write_text(text)
    assert [row.way for row in line_rows(tmp_path / "nhc.conf", "n1")] == ["nhc.conf"] * 3 + ["no"]


def test_what_a_failure_does() -> None:
    """A failure drains, as NHC's does, but for -0 and after MARK_OFFLINE=0."""
    lines = read("n1")
    assert {check.action for check in lines["check_fs_free $SCRATCH 5%"].checks} == {"drain"}
    assert {check.action for check in lines["check_ps_cpu -0 -u !root 99%"].checks} == {"report"}
    text = "n1 || check_hw_eth a\n* || export MARK_OFFLINE=0\nn1 || check_hw_eth b"
    assert [check.action for line in parse_nhc(text, "n1") for check in line.checks] == ["drain", "report"]


def test_names_do_not_change_with_limits() -> None:
    """A check keeps its name where its limit changes; two about the same have different names."""
    one, other = (names(read("n1", f"* || check_fs_free /tmp {limit}")) for limit in ("5%", "3GB"))
    assert one == other == {"nhc-fs-free-tmp"}
    twice = read("n1", "* || check_fs_free /tmp 5%\n* || check_fs_free /tmp 3GB")
    assert names(twice) == {"nhc-fs-free-tmp", "nhc-fs-free-tmp-2"}
    long = names(read("n1", f"* || check_file_test -d -k /{'x' * 80}"))
    assert (len(long), max(map(len, long)), any(name.endswith("-2") for name in long)) == (3, 64, False)


@pytest.mark.parametrize(
    ("target", "hosts", "others"),
    [
        ("*", "a n1.phys", ""),
        ("n*.viz", "n1.viz", "n1.cc n1"),
        ("!ln*", "n1", "ln1"),
        ("/n000[0-9]/", "n0001 xn0001y", "n0010"),
        ("!/\\.(gpu|htc)/", "n1.cc", "n1.gpu"),
        ("{n00[20-39]}", "n0020 n0039", "n0040 n020 n00200"),
        ("!{n03,n05,n0[7-9]}", "n04 n10", "n03 n07"),
        ("{n00[00-99].phys,n000[0-4].bio}", "n0030.phys n0001.bio", "n0100.phys n0005.bio"),
        ("{n[39-20]}", "n25", "n19"),
        ("{n[01-10]}", "n05 n10", "n5 n005"),
        ("n[0-3]x", "n2x", "n4x"),
        ("n[!0]", "n1", "n0"),
    ],
)
def test_targets(target: str, hosts: str, others: str) -> None:
    """The examples of NHC's documentation, and reversed ranges."""
    assert [host for host in hosts.split() if not is_target(host, target)] == []
    assert [host for host in others.split() if is_target(host, target)] == []


def test_ranges_within_brackets_are_no_targets() -> None:
    """NHC does not take commas within brackets, nor do we."""
    with pytest.raises(UnsupportedError):
        is_target("n0010", "{n00[10-21,23]}")


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("1024", 1 << 20), ("1k", 1024), ("5GB", 5 << 30), ("512m", 512 << 20), ("1TB", 1 << 40)]
)
def test_sizes_are_of_kilobytes(text: str, n_bytes: int) -> None:
    """A number alone is of kB; each kB is 1,024 bytes."""
    assert size_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("slack", "low", "high"), [("", 100, 100), ("25%", 80, 100 / 0.75), ("100%", 50, None), ("10", 90, 110)]
)
def test_slack_is_of_what_the_node_has(slack: str, low: float, high: float | None) -> None:
    """NHC allows a share of the actual value more or less, not one of the limit."""
    limits = limits_of("100", "100", count_of, slack)
    assert limits["min"] == pytest.approx(low)
    assert limits.get("max") == (high if high is None else pytest.approx(high))


@given(st.integers(0, 100_000), st.integers(0, 200_000))
def test_numbers_above(limit: int, number: int) -> None:
    """The expression for uids above a limit matches these and no others."""
    assert (re.fullmatch(above_regex(limit), str(number)) is not None) == (number > limit)


@given(st.text("ab*?[]!/.^$", max_size=8), st.text("ab/.", max_size=5))
def test_negation_is_the_opposite(text: str, value: str) -> None:
    """A match string after ! matches exactly what it does not match without."""
    if text.startswith("!"):
        return
    try:
        plain, negated = match_regex(text), match_regex(f"!{text}")
    except UnsupportedError:
        return
    assert (re.fullmatch(plain, value) is None) == (re.fullmatch(negated, value) is not None)


def test_match_strings_are_those_of_bash() -> None:
    """Globs and expressions match what bash, which NHC is written in, matches."""
    dice = random.Random(7)
    globs = ["".join(dice.choices(["*", "?", "a", "b", ".", "-", "[ab]", "[!a]", "[a-c]"], k=4)) for _ in range(60)]
    posix = ["^", "$", "a", "b", ".", ".*", "(a|b)", "[[:digit:]]", "[^a]", "b+", "a{2}", "-?"]
    expressions = [f"/{''.join(dice.choices(posix, k=3))}/" for _ in range(60)]
    values = ["".join(dice.choices("aab.-x1", k=dice.randint(0, 5))) for _ in range(40)]
    script = r"""
    while IFS= read -r pattern && IFS= read -r value; do
        if [[ $pattern == /*/ ]]; then body=${pattern#/}; body=${body%/}; [[ $value =~ $body ]]
        else [[ $value == $pattern ]]; fi
        echo $?
    done"""
    pairs = [(pattern, value) for pattern in (*globs, *expressions) for value in values]
    told = "".join(f"{pattern}\n{value}\n" for pattern, value in pairs)
    bash = subprocess.run(["bash", "-c", script], input=told, text=True, capture_output=True, check=True)
    for (pattern, value), code in zip(pairs, bash.stdout.split(), strict=True):
        if code != "2":  # no expression for bash
            assert is_target(value, pattern) == (code == "0"), (pattern, value)


@given(st.text(st.sampled_from("*|# \n\\'\"$({[!/-check_hw fs9%:=;") | st.characters(), max_size=60))
def test_no_text_crashes(text: str) -> None:
    """Whatever a file has, its lines are taken or reported."""
    for line in parse_nhc(text, "n1"):
        assert line.checks or line.note


ARGUMENTS = ["-0", "-f", "-m", "-u", "-t", "/", "/tmp", "5%", "1k", "0", "''", "!", "mlx5_0:1", "/x.*/", "[", "3m5s"]
ARGUMENTS += [
    "9" * 5000,
    "nan%",
    "inf%",
    "1e9%",
    "٣",
    "²",
    "/(((((/",
    "/a{999999}/",
    "'a b'",
    "--",
    "-",
    "-m",
    "!/x/",
    "{n[1-2]}",
]


@given(st.sampled_from(sorted(CONVERTERS)), st.lists(st.sampled_from(ARGUMENTS)))
def test_no_arguments_crash(name: str, arguments: list[str]) -> None:
    """Whatever arguments a check has, what is made of it is valid."""
    for line in parse_nhc(f"* || {name} {' '.join(arguments)}", "n1"):
        assert line.checks or line.note
        for check in line.checks:
            assert check_problem(check) == ""


@pytest.mark.parametrize(
    "text",
    [
        "* || X=12345678\n" + "* || X=$X$X\n" * 60 + "* || check_hw_eth $X",
        f"{{n[{'1' * 5000}-{'2' * 5000}]}} || check_hw_eth a",
        f"* || MAX_SYS_UID={'9' * 5000}\n* || check_ps_cpu 9%",
        f"* || check_ps_cpu -u {'9' * 5000} 9%",
        f"* || check_file_stat -m {'7' * 5000} /a",
        "* || check_fs_mount " + "/a " * 5000,
        f"/{'(' * 500}{')' * 500}/ || check_hw_eth a",
        "*" * 3000 + "x || check_hw_eth a",
        "\0 || \0",
    ],
    ids=["growing variable", "range", "uid", "user", "mode", "many", "nested", "stars", "nul"],
)
def test_hostile_lines_cost_little(text: str) -> None:
    """What grows without end is refused, and what is made is bounded."""
    made = [check for line in parse_nhc(text, "n1") for check in line.checks]
    assert all(check_problem(check) == "" for check in made)
    assert sum(len(str(check)) for check in made) < 10_000_000


def test_a_site_names_the_file(tmp_path: Path) -> None:
    """[nhc] file adds the lines of the node to its checks; a file that is missing is an error."""
    (tmp_path / "nhc.conf").write_text(CONF)
    (tmp_path / "node.toml").write_text(f'[nhc]\nfile = "{tmp_path}/nhc.conf"\n')
    config = load_config(tmp_path / "node.toml")
    assert {"nhc-hw-physmem", "slurmd-runs"} <= {check.name for check in checks_for(config, "gpu09")}
    assert "nhc-hw-physmem" not in {check.name for check in checks_for(config, "login1")}
    rows = line_rows(tmp_path / "nhc.conf", "gpu09")
    assert {(row.source.rpartition(":")[2], row.way) for row in rows if "physmem" in row.check} == {("9", "nhc.conf")}
    assert all(row.why for row in rows if row.way == "no")
    (tmp_path / "nhc.conf").unlink()
    with pytest.raises(ConfigError):
        checks_for(config, "gpu09")


def test_this_host_has_its_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NHC compares with the kernel's name of the host, which may have a domain that Slurm's has not."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.gpu")
    (tmp_path / "nhc.conf").write_text("*.gpu || check_hw_eth eth1")
    (tmp_path / "node.toml").write_text(f'[nhc]\nfile = "{tmp_path}/nhc.conf"\n')
    config = load_config(tmp_path / "node.toml")
    of_hosts = [{check.name for check in checks_for(config, node)} for node in ("n1", "n2")]
    assert [("nhc-hw-eth-eth1" in checks) for checks in of_hosts] == [True, False]


def test_lines_that_make_no_check_are_counted(tmp_path: Path) -> None:
    """Mistakes, also of targets that no host can have, and what is not read; not what is shipped or for other nodes."""
    wrong = ["{n[1-2] || check_hw_eth lo", "/n1 || check_hw_eth lo", "* || check_fs_fre / 5%", "* || check_fs_free /"]
    wrong += ["check_hw_eth lo", "* || check_fs_free / abc", "* || check_hw_gm myri0"]
    right = ["n2 || check_hw_eth lo", "* || check_gpu_xid", "* || X=1", "* || check_hw_eth lo"]
    file = tmp_path / "nhc.conf"
    file.write_text("\n".join(wrong + right))
    assert [line.line for line in lines.read_nhc(file, "n1") if not line.is_made] == list(range(1, len(wrong) + 1))
    assert f" {len(wrong)}: line 1, 2, 3, 4, 5, ...;" in lines.lines_without_checks(file, "n1")
    file.write_text("\n".join(right))
    assert lines.lines_without_checks(file, "n1") == ""
