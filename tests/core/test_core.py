"""Files that are whole or absent, host lists, programs, and strict TOML."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import time
import traceback
from pathlib import Path

import msgspec
import pytest

from pitools.core import fs, hostlist, strict_toml, subprocesses
from pitools.core.errors import ClusterError, ConfigError, ToolMissing, Unreachable, UsageError, most_similar, suggest


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str = ""


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    partitions: dict[str, Inner] = {}
    maybe: Inner | None = None


def test_write_atomic_replaces_and_leaves_no_trace(tmp_path: Path) -> None:
    """The new content is there and nothing else is."""
    path = tmp_path / "a"
    fs.write_atomic(path, "one")
    fs.write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a"]


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    """A folder in the file's place is refused with its path, and no temporary file stays."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    with pytest.raises(ClusterError) as caught:
        fs.write_atomic(tmp_path / "a", "x")
    assert str(tmp_path / "a") in str(caught.value)
    assert os.listdir(tmp_path) == ["a"]


def test_hosts_fold_and_expand() -> None:
    """Slurm's folded form, both ways, each name once."""
    assert hostlist.expand("n[01-03,07],x1,n02") == ["n01", "n02", "n03", "n07", "x1"]
    assert hostlist.fold(["n03", "n01", "n02"]) == "n[01-03]"


@pytest.mark.parametrize("text", ["n[01-", "n[3-1]", "@group"])
def test_hosts_refuses_what_is_no_list(text: str) -> None:
    """A broken list is a usage error that shows it."""
    with pytest.raises(UsageError, match="host list"):
        hostlist.expand(text)


def test_run_returns_code_and_text() -> None:
    """An exit code is an answer, not an exception."""
    done = subprocesses.run(
        [sys.executable, "-c", "import sys; print(sys.stdin.read()); sys.exit(3)"], timeout_s=20, stdin="in"
    )
    assert (done.code, done.stdout) == (3, "in\n")


def test_run_ends_the_whole_group_when_time_is_up(tmp_path: Path) -> None:
    """A child's child that would write later does not live to do it."""
    late = tmp_path / "late"
    with pytest.raises(Unreachable, match="no answer within"):
        subprocesses.run(["bash", "-c", f"(sleep 1; touch {late}) & sleep 30"], timeout_s=0.3)
    time.sleep(1.2)
    assert not late.exists()


def test_run_names_a_missing_program() -> None:
    """A program that is not there is a missing tool, exit code 4."""
    with pytest.raises(ToolMissing, match="no-such-program") as caught:
        subprocesses.run(["no-such-program"], timeout_s=1)
    assert caught.value.exit_code == 4


def test_run_does_not_wait_for_what_the_program_detached() -> None:
    """A detached process that holds the output delays neither the answer nor the time-out."""
    began = time.monotonic()
    done = subprocesses.run(["bash", "-c", "echo here; setsid sleep 20 & exit 3"], timeout_s=30)
    assert (done.code, done.stdout) == (3, "here\n")
    assert time.monotonic() - began < 15
    began = time.monotonic()
    with pytest.raises(Unreachable):
        subprocesses.run(["bash", "-c", "setsid sleep 20 & sleep 20"], timeout_s=0.5)
    assert time.monotonic() - began < 15


def test_run_takes_more_input_and_output_than_a_pipe_holds() -> None:
    """A megabyte goes in and comes out whole, though the program pauses for longer than one look."""
    text = "0123456789abcdef" * 65536
    assert subprocesses.run(["bash", "-c", "sleep 0.5; exec cat"], timeout_s=30, stdin=text).stdout == text


def test_a_missing_folder_is_not_a_missing_program(tmp_path: Path) -> None:
    """The folder to run in is named, and the program is not called missing."""
    folder = tmp_path / "gone"
    with pytest.raises(ClusterError, match="in this folder") as caught:
        subprocesses.start_detached(["true"], env=os.environ, log=tmp_path / "log", cwd=folder)
    assert caught.value.where == str(folder)
    assert not isinstance(caught.value, ToolMissing)


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"\x7fELF rubbish", 0o755, "Exec format error"),
        (b"", 0o644, "Permission denied"),
        (b"#!/no/such/shell\n", 0o755, "No such file"),
    ],
)
def test_a_program_that_cannot_be_run_says_why(tmp_path: Path, content: bytes, mode: int, reason: str) -> None:
    """Whatever exec says becomes a missing tool with that reason."""
    program = tmp_path / "program"
    program.write_bytes(content)
    program.chmod(mode)
    with pytest.raises(ToolMissing, match=f"cannot be run: {reason}"):
        subprocesses.run([str(program)], timeout_s=5)


# Large enough that its end takes time; and one whose first thread has ended, which looks dead and is not.
LEFT = {
    "large": "held = b'x' * (1 << 28)",
    "headless": "import ctypes, os, threading; threading.Thread(target=lambda: time.sleep(60)).start(); "
    "print('now', flush=True); ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
}


@pytest.mark.parametrize("left", LEFT)
def test_what_is_left_of_a_session_is_gone_when_killed(tmp_path: Path, left: str) -> None:
    """What a program left behind, in another process group too."""
    code = f"import time; {LEFT[left]}; print('now', flush=True); time.sleep(60)"
    process = subprocesses.start_detached(
        ["bash", "-c", f'set -m; {sys.executable} -c "{code}" & echo $!; exit 0'],
        env=os.environ,
        log=tmp_path / "log",
        session=True,
    )
    assert process.wait(20) == 0
    for _ in range(400):
        if "now" in (text := (tmp_path / "log").read_text()):
            break
        time.sleep(0.05)
    pid = next(int(word) for word in text.split() if word.isdigit())
    assert os.getpgid(pid) == pid
    subprocesses.kill_sessions(process.pid)
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert os.listdir(f"/proc/{pid}/task") == [str(pid)]


def test_foreground_passes_signals_on() -> None:
    """A signal to us reaches the program, and its own exit code comes back."""
    child = (
        "import signal,sys,os,time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7)); "
        "os.kill(os.getppid(), signal.SIGUSR2); time.sleep(20)"
    )
    assert subprocesses.run_foreground([sys.executable, "-c", child], env=os.environ) == 7


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ('nam = "x"', "nam", 'did you mean "name"?'),
        ('name = "x"\n[partitions.a]\ngpus = "h100"', "partitions.a.gpus", 'did you mean "gpu"?'),
        ('name = "x"\n[maybe]\ngup = "h100"', "maybe.gup", 'did you mean "gpu"?'),
        ("name = 3", "name", ""),
        ("name = ", "", ""),
    ],
)
def test_toml_errors_name_the_key_and_its_neighbour(tmp_path: Path, text: str, key: str, hint: str) -> None:
    """Exit code 3, the file, the key, and the nearest key."""
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        strict_toml.convert_tables(strict_toml.read_toml(path), Outer, str(path))
    assert (caught.value.key, caught.value.hint, caught.value.where) == (key, hint, str(path))
    assert key in caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [('name = "x"\nname = "secret"', "name"), ("[a]\n[b]\n[a]\n", "[a]"), ("x = 1\ny.z =\n", "y.z"), ("= 3", "")],
)
def test_what_is_no_toml_names_the_key_of_its_line(tmp_path: Path, text: str, key: str) -> None:
    """And not its value, which may be private."""
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        strict_toml.read_toml(path)
    assert f', at "{key}"' in caught.value.message or not key
    assert "secret" not in caught.value.message


def test_an_error_crosses_processes_whole() -> None:
    """With every field, also of one that was added to after it was made."""
    error = ConfigError("no such thing", where="here", hint="look elsewhere", key="a.b")
    error.where += ", and there"
    record = pickle.loads(pickle.dumps(error))
    assert (type(record), str(record)) == (ConfigError, "here, and there: no such thing")
    assert (record.hint, record.key) == ("look elsewhere", "a.b")


def test_a_hint_is_added_to_a_new_error() -> None:
    """Of the same class and fields; the error itself stays as it was raised."""
    error = ConfigError("no such thing", where="here", key="a")
    more = error.with_hint("edit it").with_hint("or remove it")
    assert (type(more), str(more), more.key, more.hint) == (ConfigError, str(error), "a", "edit it; or remove it")
    assert error.hint == ""
    assert "next: edit it; or remove it" in "".join(traceback.format_exception(pickle.loads(pickle.dumps(more))))


def test_nearest_falls_back_to_the_choices() -> None:
    """Nothing near: the choices; no choices: nothing."""
    assert suggest("zzz", ["alpha", "beta"]) == "known: alpha, beta"
    assert suggest("zzz", []) == ""
    assert suggest("aplha", iter(["alpha", "beta"])) == 'did you mean "alpha"?'
    assert most_similar("alpa", {"beta", "alpha"}) == "alpha"
    assert most_similar("zzz", ["alpha", "beta"]) == ""


@pytest.mark.parametrize("text", ["n[1-1000000000]", "n[1", "n]1", "@all", "a&b", "n[]", "n[3-1]"])
def test_what_is_no_host_list_is_said_at_once(text: str) -> None:
    """Nothing is made of a list that is none, or that stands for more nodes than any cluster has."""
    with pytest.raises(UsageError):
        hostlist.expand(text)


def test_blanks_divide_a_host_list() -> None:
    """Lists that were pasted, with newlines and blanks between and within, are read as they look."""
    assert hostlist.expand("n1\nn2 n3, n[4-5, 07]") == ["n1", "n2", "n3", "n4", "n5", "n07"]


def test_a_schema_is_one_record(repo: Path) -> None:
    """No two records have one name in their output; one that only adds fields to another may have its name."""
    texts = [path.read_text() for path in (repo / "pitools").rglob("*.py")]
    tags = [tag for text in texts for tag in re.findall(r'^class \w+\(Record,[^)]*tag="([^"]+)"', text, re.M)]
    assert sorted(set(tags)) == sorted(tags)
