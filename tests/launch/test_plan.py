"""From a request and a site to a plan, and from a plan to a script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.core.errors import ConfigError, DataError
from pitools.dataset.catalog.retirement import retire_version
from pitools.launch import plan as planning
from pitools.launch.request import Request, fill_datasets
from pitools.site import load
from pitools.store import manifest, tags
from pitools.store.manifest import Manifest, encode_manifest, version_of

MakePlan = Callable[..., planning.Plan]


@pytest.mark.parametrize(
    ("site", "keys", "message", "hint"),
    [
        ("alpha", {"partition": "trian"}, 'no partition "trian"', "train"),
        ("alpha", {"tier": "hihg"}, 'no tier "hihg"', "high"),
        ("alpha", {"account": "labs"}, 'no account "labs"', "lab"),
        ("alpha", {"nodes": 9}, "nodes = 9", "8 or fewer"),
        ("alpha", {"gpus_per_node": 1}, "gpus_per_node = 1", ""),
        ("alpha", {"partition": "dev", "time": "5h"}, "over the limit", "4:00:00"),
        ("alpha", {"segment": 2}, "has no --segment", ""),
        ("alpha", {"nodelist": "alpha[01-03]", "nodes": 2}, "nodelist: 3 nodes (expected at most 2", "nodes = 3"),
        ("h100-ib", {"gpus_per_node": 9}, "gpus_per_node = 9", ""),
    ],
)
def test_request_beyond_the_site_is_refused_before_slurm(
    make_plan: MakePlan, site: str, keys: dict[str, object], message: str, hint: str
) -> None:
    """It raises ConfigError, and its hint names a value that the site has."""
    with pytest.raises(ConfigError) as caught:
        make_plan(site, **keys)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_data_that_is_no_dataset_is_refused(make_plan: MakePlan, tmp_path: Path) -> None:
    """A folder without a manifest is exit code 5."""
    with pytest.raises(DataError, match="not a dataset"):
        make_plan("alpha", data={"demo": str(tmp_path)})


def test_a_dataset_is_found_where_the_site_keeps_them(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is no folder here is searched below the site's paths.data, and means its one version."""
    raw = manifest.encode_manifest(manifest.Manifest(name="pick", episodes=0, steps=0, arrays={}, files=()))
    version = tmp_path / "data" / "pick" / manifest.version_of(raw)
    version.mkdir(parents=True)
    (version / manifest.MANIFEST_FILE).write_bytes(raw)
    (tmp_path / "local.toml").write_text(f'[paths]\ndata = "{tmp_path}/data"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    (staged,) = make_plan("local", data={"demo": "pick"}).data
    assert (staged.source, staged.version) == (str(version), version.name)


def test_a_plan_survives_a_pipe(make_plan: MakePlan) -> None:
    """`run -` reads the plan that `plan` prints."""
    plan = make_plan("alpha", nodes=4, env={"A": "b"})
    assert msgspec.json.decode(msgspec.json.encode(plan), type=planning.Plan) == plan


def test_the_script_has_only_flags_of_the_dialect(make_plan: MakePlan) -> None:
    """The same request gets each site's flags, and no flag that the site rejects."""
    texts = {
        site: planning.render_script(make_plan(site, nodes=2), load.load_site(site), run_dir="/r/t-1", payload="true")
        for site in ("alpha", "aws-p5-efa", "gb200-nvl72")
    }
    assert "#SBATCH --account=lab" in texts["alpha"]
    assert "--account" not in texts["aws-p5-efa"]
    assert "--mem" not in texts["aws-p5-efa"]
    assert "#SBATCH --mem=0" in texts["gb200-nvl72"]
    assert "#SBATCH --exclusive" in texts["gb200-nvl72"]
    block = planning.render_script(
        make_plan("gb200-nvl72", nodes=36, segment=18), load.load_site("gb200-nvl72"), run_dir="/r", payload="true"
    )
    assert "#SBATCH --segment=18" in block
    assert all("--kill-on-bad-exit=1" in text and "wckey" not in text for text in texts.values())


def test_hostile_values_stay_values(make_plan: MakePlan) -> None:
    """Shell syntax in a value is quoted in the script."""
    plan = make_plan("alpha", env={"A": "$(touch /tmp/owned); `id` 'x' \"y\""}, constraint="a&b")
    text = planning.render_script(plan, load.load_site("alpha"), run_dir="/r/it's", payload="true")
    assert """export A='$(touch /tmp/owned); `id` '"'"'x'"'"' "y"'""" in text
    assert "#SBATCH --constraint='a&b'" in text
    assert """export PIT_RUN_DIR='/r/it'"'"'s'""" in text


def test_a_dataset_by_its_tag(make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--data demo=data/bridge@good` is the version that the tag names now, from here and below `paths.data`."""
    home = tmp_path / "data/bridge"
    manifest = Manifest(name="bridge", episodes=1, steps=1, arrays={}, files=())
    data = [encode_manifest(msgspec.structs.replace(manifest, episodes=number)) for number in (1, 2)]
    for text in data:
        (home / version_of(text)).mkdir(parents=True)
        (home / version_of(text) / "manifest.json").write_bytes(text)
    old, new = map(version_of, data)
    os.utime(home / old / "manifest.json", (1, 1))
    tags.move_tag(home.parent, "bridge", "good", old)
    site = load.load_site("alpha")
    site = msgspec.structs.replace(site, paths=msgspec.structs.replace(site.paths, data=str(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    for location, version in (
        ("data/bridge@good", old),
        ("data/bridge", new),
        (f"data/bridge/{old[:6]}", old),
        ("bridge@good", old),
        ("bridge", new),
        (f"bridge/{new[:6]}", new),
    ):
        request = Request(name="t", command="true", time="5m", workdir=str(tmp_path), data={"demo": ""})
        (staged,) = planning.make_plan(fill_datasets(request, {"demo": location}), site, "test").data
        assert (staged.version, staged.source) == (version, str(home / version)), location
    retire_version(home / new)
    assert planning.make_plan(fill_datasets(request, {"demo": "bridge"}), site, "test").data[0].version == old


@pytest.mark.parametrize("framework", ["none", "jax", "torch"])
def test_command_gets_a_signal_only_on_request(make_plan: MakePlan, framework: str) -> None:
    """For any framework: a signal ends a program without a handler. An entry gets its framework's signal."""
    entry = {"none": "", "jax": "TERM@75", "torch": "USR2@75"}[framework]
    assert make_plan("local", framework=framework).job.signal == ""
    assert make_plan("local", framework=framework, signal="USR2@90").job.signal == "USR2@90"
    assert make_plan("local", framework=framework, entry="a:b").job.signal == entry
