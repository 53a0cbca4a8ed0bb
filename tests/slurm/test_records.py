"""The records: their frozen keys, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from pitools.core.record import Record
from pitools.slurm import records

KEYS = {
    "pit.node/1": "node state flags partitions gres gpu_type gpus gpus_allocated cpus cpus_allocated memory_mib"
    " features reason address",
    "pit.partition/1": "partition state is_default node_list nodes cpus min_nodes max_nodes max_time_s"
    " grace_s allow_accounts allow_qos allow_groups deny_accounts deny_qos qos over_subscribe billing_weights tres",
    "pit.reservation/1": "reservation start end state node_list cpus flags users accounts",
    "pit.job/1": "job_id raw_id state array_job_id array_task name user account qos partition reason nodes node_list"
    " start end time_limit_s elapsed_s priority gres comment work_dir restarts",
    "pit.accounting/1": "job_id raw_id state cancelled_by_uid exit_code signal name user account qos"
    " partition submit start end elapsed_s time_limit_s nodes node_list alloc_tres reason comment"
    " restarts",
    "pit.association/1": "cluster account user partition qos default_qos grp_tres max_tres parent grp_jobs grp_submit"
    " grp_wall_s grp_tres_mins grp_tres_run_mins max_jobs max_submit max_wall_s max_tres_mins max_tres_per_node",
    "pit.qos/1": "qos priority preempt grace_s flags grp_tres max_tres_per_user max_wall_s max_tres grp_jobs grp_submit"
    " grp_wall_s grp_tres_mins grp_tres_run_mins max_tres_mins max_tres_per_node min_tres max_jobs_per_user"
    " max_submit_per_user max_jobs_per_account max_submit_per_account max_tres_per_account preempt_mode usage_factor"
    " limit_factor max_tres_run_mins_per_user max_tres_run_mins_per_account",
    "pit.limit-usage/1": "qos account user partition jobs submitted wall_s tres tres_mins tres_run_mins",
    "pit.config/1": "cluster version values",
    "pit.switch/1": "switch level node_list switches",
    "pit.block/1": "block index node_list size is_aggregated",
    "pit.estimate/1": "start cpus node_list partition cluster",
    "pit.submitted/1": "job_id cluster",
}


@pytest.mark.parametrize("schema", KEYS)
def test_keys_are_frozen(schema: str) -> None:
    """A record's keys stay; new ones come at the end, with a default."""
    kinds = {
        kind.__struct_config__.tag: kind
        for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
    }
    assert set(kinds) == set(KEYS)
    assert kinds[schema].__struct_fields__[: len(KEYS[schema].split())] == tuple(KEYS[schema].split())


def test_a_record_goes_through_json_unchanged() -> None:
    """A node is the same after it was written and read."""
    node = records.Node(node="n1", state="idle", flags=("drain",), reason="x\ny")
    line = msgspec.json.encode(node)
    assert line.startswith(b'{"schema":"pit.node/1","node":"n1"')
    assert msgspec.json.decode(line, type=records.Node) == node


def test_importing_records_is_light() -> None:
    """Importing the records loads neither a heavy library nor anything that starts programs."""
    code = "import sys, pitools.slurm.records; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "jax", "torch", "zarr", "submitit", "rich", "click", "ClusterShell", "jinja2"}
    assert not loaded & {"subprocess", "pitools.core.subprocesses", "pitools.slurm.client"}
