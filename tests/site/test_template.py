"""A site's own templates: what they may do, and whose they may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import ConfigError
from pitools.site import load, user_scripts


@pytest.fixture
def render(write_site: Callable[[str, str], Path]) -> Callable[[str], str]:
    """Renders a site's own template of this text."""

    def call(text: str) -> str:
        path = write_site("x", 'name = "x"\nscheduler = "none"\n[templates]\nown = "own.sbatch.j2"\n')
        template = path.with_name("own.sbatch.j2")
        if not template.exists():
            template.write_text(text)
        return user_scripts.render_for_user(
            load.load_site("x"),
            "own",
            ["true"],
            nodes=1,
            tasks_per_node=1,
            gpus_per_node=None,
            time="",
            framework="none",
            data={},
        )

    return call


def test_the_folder_of_slurm_s_commands_is_on_the_job_s_path(write_site: Callable[[str, str], Path]) -> None:
    """Before the first step that needs them, and after modules and variables that may change the PATH."""
    write_site("x", 'name = "x"\nmodules = ["m"]\n[slurm]\nbin = "/opt/s 1/bin"\n[environment]\nPATH = "/usr/bin"\n')
    text = user_scripts.render_for_user(
        load.load_site("x"),
        "train",
        ["true"],
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=None,
        time="",
        framework="none",
        data={},
    )
    ours = "export PATH='/opt/s 1/bin':\"$PATH\""
    position = [text.index(part) for part in ("module load m", "export PATH=/usr/bin", ours)]
    assert position == sorted(position)
    assert position[-1] < text.index("scontrol")


@pytest.mark.parametrize(
    "reach", ["cycler.__init__.__globals__.os.popen('touch {}').read()", "modules.__class__.__base__.__subclasses__()"]
)
def test_a_template_runs_nothing(render: Callable[[str], str], tmp_path: Path, reach: str) -> None:
    """What leads from a value to Python's modules is refused, exit 3; the program is not run."""
    with pytest.raises(ConfigError) as caught:
        render("{{ " + reach.format(tmp_path / "ran") + " }}")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["own.sbatch.j2", "part.j2"])
def test_a_template_that_others_can_write_is_refused(render: Callable[[str], str], tmp_path: Path, name: str) -> None:
    """The template itself, and what it includes from beside it; the shipped parts are included as ever."""
    text = "{% include 'part.j2' %}{% include '_stage.sh.j2' %}"
    (tmp_path / "sites" / "part.j2").write_text("echo part\n")
    assert "echo part" in render(text)
    (tmp_path / "sites" / name).chmod(0o666)
    with pytest.raises(ConfigError) as caught:
        render(text)
    assert str(tmp_path / "sites" / name) in caught.value.where


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "x/../../secret", ""])
def test_a_template_includes_nothing_from_elsewhere(render: Callable[[str], str], tmp_path: Path, name: str) -> None:
    """An include is a name beside the template, or of a shipped part."""
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ConfigError):
        render(f"{{% include '{name}' %}}")
