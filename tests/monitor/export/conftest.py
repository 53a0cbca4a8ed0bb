"""A site whose Slurm is a folder of small programs, and its state in a folder of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ledger")]  # for slurm_texts, run_maker

from slurm_texts import CLOCK_S, SEP, job_text, node_text  # noqa: E402

from pitools.site.schema import Connection, Monitor, Paths, Site, SitePartition, Slurm  # noqa: E402


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    """Makes a site whose squeue and scontrol print these texts, or fail by these lines of a shell."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)

    def make(
        name: str = "alpha",
        jobs: str = "",
        nodes: str = "",
        fail: str = "",
        timeout_s: float = 20.0,
        url: str = "",
        **more: object,
    ) -> Site:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "jobs").write_text(jobs or job_text())
        (folder / "nodes").write_text(nodes or node_text("n01", "ALLOCATED", used=4) + node_text("n02"))
        (folder / "switches").write_text("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[01-02]\n")
        # The columns are separated by what the command asks for, in its last word.
        print_jobs = f'for s; do :; done; s=${{s#JobArrayID:}}; s=${{s%%,State*}}; sed "s/{SEP}/$s/g" {folder}/jobs'
        programs = {
            "squeue": fail or print_jobs,
            "scontrol": fail or f'case "$*" in *topo*) cat {folder}/switches;; *) cat {folder}/nodes;; esac',
            "date": f"echo {CLOCK_S}",
            "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1",
        }
        for program, text in programs.items():
            path = folder / program
            path.write_text(f"#!/bin/sh\necho {program} >> {folder}/calls\n{text}\n")
            path.chmod(0o755)
        return Site(
            name=name,
            tiers={"high": "urgent", "usual": "normal"},
            partitions={"gpu": SitePartition(price_per_node_hour=2.0, gpus_per_node=4)},
            connection=Connection(timeout_s=timeout_s),
            slurm=Slurm(bin=str(folder)),
            paths=Paths(runs=str(folder / "runs")),
            monitor=Monitor(slurm_metrics_url=url),
            **more,
        )

    return make
