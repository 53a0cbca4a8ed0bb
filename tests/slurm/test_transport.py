"""How commands are reached: the environment they run in, and the quoting that ssh needs.

The far end of ssh is stood in for by a script that does what sshd does with the words behind the host: it gives them,
joined by spaces, to a shell.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError, ToolMissing, Unreachable
from pitools.slurm import multi_query
from pitools.slurm.client import Client
from pitools.slurm.transport import QUERY_ENV, Transport, run_command

FAR_END = (
    '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = login ] || exit 255\nshift 2\nexec {shell} -c "$*"\n'
)


@pytest.fixture(params=["sh", "bash"])
def far_end(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """A host `login` whose users have this shell."""
    if not shutil.which(request.param):
        pytest.skip(f"there is no {request.param} here")
    script = tmp_path / "ssh"
    script.write_text(FAR_END.format(shell=request.param))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Transport(host="login", timeout_s=10)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_every_word_arrives_as_it_was(far_end: Transport, words: list[str]) -> None:
    """Quotes, spaces, newlines, dollars and backquotes go through ssh unchanged."""
    done = run_command(far_end, ["printf", "%s\\0", *words, "end"], env={})
    assert done.stdout.split("\0")[:-1] == [*words, "end"]


def test_hostile_words_run_nothing(far_end: Transport, tmp_path: Path) -> None:
    """A word that would be a command in a shell is only a word, in arguments and in the environment."""
    target = tmp_path / "touched"
    text = f"';touch {target};$(touch {target})`touch {target}`\n\"&|!#\\"
    reach = Transport(host="login", env={"ODD": text}, timeout_s=10)
    done = run_command(reach, ["sh", "-c", 'printf "%s" "$1$ODD"', "sh", text], env={})
    assert done.stdout == text + text
    assert not target.exists()


@pytest.mark.parametrize("host", ["", "login"])
def test_slurm_variables_stay_behind(
    far_end: Transport, host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On both sides commands run without the caller's Slurm variables, but with SLURM_CONF and what the reach sets."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=c\n")
    for name in (
        "SQUEUE_FORMAT",
        "SLURM_TIME_FORMAT",
        "SLURM_CLUSTERS",
        "SBATCH_PARTITION",
        "SLURM_JOB_ID",
        "SINFO_SORT",
    ):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("SLURMX", "kept")
    done = run_command(Transport(host=host, env={"SITE": "a b"}, timeout_s=10), ["env"], env=QUERY_ENV)
    observed = dict(line.partition("=")[::2] for line in done.stdout.split("\n"))
    assert {name for name in observed if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_"))} == {
        "SLURM_CONF",
        "SLURM_BITSTR_LEN",
    }
    assert (observed["SLURM_CONF"], observed["SITE"], observed["SLURMX"], observed["TZ"]) == (
        str(conf),
        "a b",
        "kept",
        "UTC0",
    )


def test_a_conf_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run with a slurm.conf whose PluginDir another user may choose: of the site, or of the shell."""
    conf = tmp_path / "open" / "slurm.conf"
    conf.parent.mkdir()
    conf.write_text("ClusterName=c\n")
    conf.parent.chmod(0o777)
    ran = tmp_path / "ran"
    for reach in (Transport(env={"SLURM_CONF": str(conf)}), Transport()):
        monkeypatch.setenv("SLURM_CONF", str(conf))
        with pytest.raises(ConfigError) as caught:
            run_command(reach, ["touch", str(ran)], env={})
        assert caught.value.where == str(conf.parent)
    assert not ran.exists()


# What srun, mpirun and their like leave in the shells that are born in a step; and what a user sets.
LEFT = (
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_TASK",
    "SLURMD_NODENAME",
    "SRUN_DEBUG",
    "PMI_RANK",
    "PMI_FD",
    "PMI2_SIZE",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_URI21",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_UNIVERSE_SIZE",
    "PRTE_LAUNCHED",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_ess_base_vpid",
    "PALS_RANKID",
    "HYDI_CONTROL_FD",
    "MV2_COMM_WORLD_RANK",
)
KEPT = ("PMIX_MCA_gds", "OMPI_MCA_btl", "HYDRA_FULL_ERROR", "SLURMX", "MY_PMI_RANK", "OMP_NUM_THREADS", "PMIXED")


@pytest.mark.parametrize("host", ["", "login"])
def test_a_rank_s_variables_stay_behind(far_end: Transport, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job submitted from within a step is not bound to its cores and does not take itself for one of its ranks."""
    for name in (*LEFT, *KEPT):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    done = run_command(Transport(host=host, timeout_s=10), ["env"], env={})
    observed = {line.partition("=")[0] for line in done.stdout.split("\n")}
    assert not observed & {*LEFT}
    assert observed >= {*KEPT}


@pytest.mark.parametrize("host", ["", "login"])
def test_a_folder_of_commands_comes_before_the_path(far_end: Transport, host: str, tmp_path: Path) -> None:
    """What is there is run in place of what the PATH has; a folder whose name a shell would read is only a name."""
    folder = tmp_path / "o'p $t" / "bin"
    folder.mkdir(parents=True)
    (folder / "scontrol").write_text("#!/bin/sh\necho mine; env\n")
    (folder / "scontrol").chmod(0o755)
    stdout = run_command(Transport(host=host, bin=str(folder), timeout_s=10), ["scontrol"], env=QUERY_ENV).stdout
    assert stdout.startswith("mine\n")
    assert f"PATH={folder}:" in stdout
    if not host:
        (folder / "tar").touch(0o755)
        for path in (folder, folder / "scontrol", folder / "tar"):
            path.chmod(0o777)
            with pytest.raises(ConfigError, match=rf"{path.name}.* can be written by everybody"):
                run_command(Transport(bin=str(folder)), ["scontrol"], env={})
            path.chmod(0o755)


@pytest.mark.parametrize("which", ["conf", "bin"])
def test_what_others_can_write_there_is_not_used(far_end: Transport, tmp_path: Path, which: str) -> None:
    """A far slurm.conf, or folder of commands, that others can change: nothing runs, and the path is named."""
    folder = tmp_path / "o'p $t" / "etc"
    folder.mkdir(parents=True)
    (folder / "slurm.conf").touch(0o644)
    far = {"env": {"SLURM_CONF": str(folder / "slurm.conf")}} if which == "conf" else {"bin": str(folder)}
    reach = Transport(host="login", timeout_s=10, **far)  # type: ignore[arg-type]
    argv = ["touch", str(tmp_path / "ran")]
    for path in (folder / "slurm.conf", folder, folder.parent):
        was = path.stat().st_mode
        path.chmod(0o777)
        if which == "conf" or path.is_dir():
            with pytest.raises(ConfigError, match="can be written by others") as caught:
                run_command(reach, argv, env={})
            assert str(path) in caught.value.message
            assert not (tmp_path / "ran").exists()
        path.chmod(was)
    assert run_command(reach, argv, env={}).code == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("harm", ["writable", "sticky", "link", "command"])
def test_what_is_looked_at_there_does_not_run(
    far_end: Transport, tmp_path: Path, harm: str, request: pytest.FixtureRequest
) -> None:
    """What others put into a folder of commands, or behind a link of theirs, runs neither before the check nor after
    it: in a sticky folder, too, and also where the folder itself is safe."""
    folder = tmp_path / "t" / "bin"
    folder.mkdir(parents=True)
    for name in ("find", "id", "readlink", "env", "squeue"):
        (folder / name).write_text(f"#!/bin/sh\n: > {tmp_path}/ran\n")
        (folder / name).chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(folder)
    folder.chmod({"writable": 0o777, "sticky": 0o1777}.get(harm, 0o755))
    if harm == "command":
        (folder / "squeue").chmod(0o777)
    if harm == "link":
        request.getfixturevalue("as_root")
        os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match="can be written by others"):
        run_command(msgspec.structs.replace(far_end, bin=str(link)), ["true"], env={})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("over", ["its last part", "a part in the middle"])
@pytest.mark.parametrize("which", ["conf", "bin"])
@pytest.mark.parametrize("harm", ["writable", "owner"])
def test_what_leads_from_link_to_link_is_looked_at(
    far_end: Transport, tmp_path: Path, harm: str, which: str, over: str, request: pytest.FixtureRequest
) -> None:
    """A link in the middle of a chain is refused where its folder is writable by all or it is another user's, and
    nothing runs. Safe links are accepted, relative and absolute, in a sticky folder too."""
    (tmp_path / "real" / "bin").mkdir(parents=True)
    (tmp_path / "real" / "bin" / "slurm.conf").touch(0o644)
    shared = tmp_path / "o'p $t" / "shared"
    shared.mkdir(parents=True)
    hop, own_part, ran = shared / "h op", tmp_path / "mine", tmp_path / "ran"
    if over == "its last part":
        hop.symlink_to("../../real/bin")
        own_part.symlink_to(hop)
    else:
        hop.symlink_to(tmp_path / "real")
        own_part.symlink_to("o'p $t/../o'p $t//./shared/h op/bin/")
    far = {"env": {"SLURM_CONF": f"{own_part}/slurm.conf"}} if which == "conf" else {"bin": str(own_part)}
    reach = msgspec.structs.replace(far_end, **far)
    for mode in (0o755, 0o1777):
        shared.chmod(mode)
        assert run_command(reach, ["true"], env={}).code == 0
    if harm == "writable":
        shared.chmod(0o777)
    else:
        request.getfixturevalue("as_root")
        os.chown(hop, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match="can be written by others") as caught:
        run_command(reach, ["touch", str(ran)], env={})
    assert caught.value.message.startswith(f"{shared if harm == 'writable' else hop} can")
    assert not ran.exists()


def test_a_command_s_links_are_looked_at(far_end: Transport, tmp_path: Path) -> None:
    """A command in a safe folder is refused where its link goes through a folder that all can write to."""
    for name in ("bin", "shared", "real"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "squeue").touch(0o755)
    (tmp_path / "shared" / "hop").symlink_to("../real/squeue")
    (tmp_path / "bin" / "squeue").symlink_to("../shared/hop")
    reach = msgspec.structs.replace(far_end, bin=str(tmp_path / "bin"))
    assert run_command(reach, ["true"], env={}).code == 0
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others") as caught:
        run_command(reach, ["true"], env={})
    assert caught.value.message.startswith(f"{tmp_path / 'shared'} can")


@pytest.mark.parametrize(("links", "ok"), [(40, True), (41, False)])
def test_no_more_links_are_followed_than_by_the_kernel(
    far_end: Transport, tmp_path: Path, links: int, ok: bool
) -> None:
    """40 of them; what a 41st leads to is refused, and so is what leads round in a circle, which ends."""
    (tmp_path / "0").touch(0o644)
    for i in range(links):
        (tmp_path / f"{i + 1}").symlink_to(f"{i}")
    (tmp_path / "round").symlink_to("about")
    (tmp_path / "about").symlink_to(tmp_path / "round")
    names = [f"{links}"] if ok else [f"{links}", "round", "round/slurm.conf"]
    for name in names:
        reach = msgspec.structs.replace(far_end, env={"SLURM_CONF": f"{tmp_path}/{name}"})
        if ok:
            assert run_command(reach, ["true"], env={}).code == 0
        else:
            with pytest.raises(ConfigError, match="or is a loop of links") as caught:
                run_command(reach, ["true"], env={})
            assert caught.value.message.startswith(f"{tmp_path}/{name} can")


def test_stdin_and_exit_codes_go_through(far_end: Transport) -> None:
    """A script on stdin arrives; a command's own 255 is not taken for a failure of ssh."""
    assert run_command(far_end, ["cat"], env={}, stdin="#!/bin/sh\n'é'\n").stdout == "#!/bin/sh\n'é'\n"
    assert run_command(far_end, ["sh", "-c", "exit 3"], env={}).code == 3
    assert run_command(far_end, ["sh", "-c", "exit 255"], env={}).code == 254


def test_a_command_that_is_not_there(far_end: Transport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without Slurm is told apart from a host that does not answer, here and there."""
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "bash", "env", "grep"):
        if actual := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(actual)
    monkeypatch.setenv("PATH", f"{tmp_path}:{tmp_path / 'bin'}")
    with pytest.raises(ToolMissing, match='"sinfo" is not on the PATH of login'):
        Client(far_end).version()
    with pytest.raises(ToolMissing, match='"sinfo" is not on the PATH') as caught:
        Client().version()
    assert "[slurm] bin" in caught.value.hint


def test_queries_without_an_answer_name_the_commands(told_nothing: Transport) -> None:
    """Not the shell that they run in."""
    with pytest.raises(Unreachable) as caught:
        multi_query.run_queries(told_nothing, [["scontrol", "show", "config"], ["sinfo"]])
    assert caught.value.where == "scontrol and sinfo"
    assert "within 0.5 s" in caught.value.message


@pytest.fixture
def told_nothing(tmp_path: Path) -> Transport:
    """A cluster here whose scontrol hangs."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    return Transport(bin=str(tmp_path), timeout_s=0.5049)


def test_a_host_that_refuses() -> None:
    """The real ssh to a closed port is Unreachable, and names the host."""
    if not shutil.which("ssh"):
        pytest.skip("there is no ssh here")
    with pytest.raises(Unreachable, match=r'ssh to "nobody@127\.0\.0\.1" failed') as caught:
        Client(Transport(host="nobody@127.0.0.1", timeout_s=5)).version()
    assert caught.value.where == "sinfo on nobody@127.0.0.1"
    assert "ssh -o BatchMode=yes" in caught.value.hint


def test_a_host_that_never_answers(far_end: Transport) -> None:
    """A far end that hangs is given up after the time-out, and the error names command and host."""
    with pytest.raises(Unreachable, match="no answer within") as caught:
        run_command(Transport(host="login", timeout_s=0.3), ["sleep", "20"], env={})
    assert caught.value.where == "sleep on login"


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "host;x", "a\n", "$(x)"])
def test_hosts_that_ssh_could_misread(host: str) -> None:
    """An option or a command is not a host."""
    with pytest.raises(ConfigError, match="not an ssh destination"):
        Transport(host=host)


def test_variables_that_env_could_misread() -> None:
    """An option is not a variable's name."""
    with pytest.raises(ConfigError, match="environment variable"):
        Transport(env={"-u": "PATH"})


def test_a_missing_slurm_conf_is_said_at_once(tmp_path: Path) -> None:
    """Slurm would retry for a minute; we name the file instead."""
    with pytest.raises(ConfigError, match="no such file") as caught:
        Client(Transport(env={"SLURM_CONF": str(tmp_path / "none")})).nodes()
    assert caught.value.where == f"SLURM_CONF={tmp_path / 'none'}"
