"""Small traces and scenarios."""

from __future__ import annotations

from collections.abc import Sequence

from pitools.place.simulate.model import Scenario, SimPool, Trace


def trace(*jobs: tuple[float, int, float, float], queues: Sequence[str] = ()) -> Trace:
    """Jobs of (submit_s, gpus, run_s, limit_s), in order of submission."""
    every = len(jobs)
    return Trace(
        name="small",
        job_id=[f"j{number}" for number in range(every)],
        submit_s=[job[0] for job in jobs],
        gpus=[job[1] for job in jobs],
        run_s=[job[2] for job in jobs],
        limit_s=[job[3] for job in jobs],
        owner=[""] * every,
        job_name=[""] * every,
        queue=list(queues) or [""] * every,
        rank_score=[0.0] * every,
    )


def scenario(*sizes: int, **more: object) -> Scenario:
    """Pools a, b, c... of so many GPUs."""
    pools = tuple(SimPool(pool="abcdef"[number], gpus=size) for number, size in enumerate(sizes))
    return Scenario(**{"name": "small", "pools": pools, **more})  # type: ignore[arg-type]
