"""What is asked of each site, each in its own thread: its folder of runs, its Slurm, its ledgers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pitools.core import hostlist
from pitools.core.errors import ClusterError, PitError
from pitools.launch import slurm_cache
from pitools.launch.run_lookup import missing_runs_dir, runs_dir
from pitools.launch.slurm_cache import CachedState
from pitools.monitor.live.feed import Feed
from pitools.monitor.live.followed_runs import FollowedRun, FollowedRuns
from pitools.monitor.live.ledgers import Ledgers
from pitools.place.clusters import cache, snapshot
from pitools.place.clusters.snapshot import ControllerState
from pitools.site import load
from pitools.site.schema import Site
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import is_schedulable

RUNS_EVERY_S, SLURM_EVERY_S = 1.0, 5.0
_STALE_RUNS_S, _STALE_SLURM_S = 10.0, 90.0


class Queue(NamedTuple):
    """A partition: its nodes and GPUs, jobs of all users that we may see, and the most frequent reason to wait."""

    partition: str
    state: str
    nodes: int
    idle: int
    unusable: int
    gpus: int
    gpus_used: int
    running: int
    pending: int
    reason: str


class SlurmView(NamedTuple):
    """A site's Slurm. seen_s: when its controller was asked, Unix time. unusable: nodes that are down or drained."""

    states: dict[str, CachedState]
    seen_s: float
    queues: tuple[Queue, ...]
    unusable: tuple[Node, ...]


class SiteFeeds:
    """The feeds of a site. slurm: None for a site without Slurm. problem: of its file, with which nothing is asked."""

    def __init__(self, name: str, site: Site | None = None, problem: PitError | None = None) -> None:
        self.name, self.site, self.problem = name, site, problem
        self.runs: Feed[list[FollowedRun]] | None = None
        self.slurm: Feed[SlurmView] | None = None
        self.ledgers: Ledgers | None = None
        if site is None:
            return
        followed = FollowedRuns(runs_dir(site), site)
        self.runs = Feed(name, lambda: self._read_runs(site, followed), RUNS_EVERY_S)
        self.ledgers = Ledgers(self.runs)
        if site.scheduler == "slurm":
            self.slurm = Feed(name, lambda: read_slurm(site, followed.open_jobs(), self.view), SLURM_EVERY_S)

    @property
    def feeds(self) -> list[Feed[Any]]:
        """What is asked."""
        return [feed for feed in (self.runs, self.slurm, self.ledgers) if feed]

    @property
    def view(self) -> SlurmView | None:
        """What Slurm last answered."""
        return self.slurm.answer.value if self.slurm else None

    def _read_runs(self, site: Site, followed: FollowedRuns) -> list[FollowedRun]:
        if missing := missing_runs_dir(site):
            raise missing
        view = self.view
        return followed.poll(view.states if view else {})

    @property
    def slurm_age_s(self) -> float:
        """Seconds since the controller was asked whose answer is shown; since the start without one."""
        view = self.view
        return max(0.0, time.time() - view.seen_s) if view else self.slurm.age_s if self.slurm else 0.0

    @property
    def is_slurm_stale(self) -> bool:
        """Whether what is shown of Slurm may be no longer true."""
        return self.slurm is not None and (self.slurm.answer.error is not None or self.slurm_age_s > _STALE_SLURM_S)

    @property
    def is_runs_stale(self) -> bool:
        """Whether what is shown of the folder of runs may be no longer true."""
        return self.runs is None or self.runs.answer.error is not None or self.runs.age_s > _STALE_RUNS_S


def read_slurm(site: Site, open_jobs: Sequence[str], before: SlurmView | None) -> SlurmView:
    """Return the view of a site's Slurm, within its time-out. Both answers are shared by all processes of this user.

    open_jobs: ids of our jobs whose states are asked for. before: the last view, whose queues are kept while they are
    new: those of a large cluster are megabytes. Raises PitError.
    """
    states = slurm_cache.cached_states(site, open_jobs)
    if failure := next((one.failure for one in states.values() if one.failure), None):
        raise ClusterError(failure.message, where=failure.where, hint=failure.hint)
    if before and time.time() - before.seen_s < snapshot.MAX_AGE_S:
        return before._replace(states=states)
    state = cache.get_or_query(
        snapshot.cache_key(site, "controller"),
        ControllerState,
        lambda left_s: snapshot.query_controller(site, left_s),
        max_age_s=snapshot.MAX_AGE_S,
        timeout_s=site.connection.timeout_s,
    )
    return SlurmView(states, state.seen_s, queues_of(state), tuple(filter(_is_unusable, state.nodes)))


def _is_unusable(node: Node) -> bool:
    return not is_schedulable(node.state, node.flags)


def queues_of(state: ControllerState) -> tuple[Queue, ...]:
    """Return the partitions of a controller's answer, in its order."""
    nodes = {node.node: node for node in state.nodes}
    jobs_of: dict[str, list[SlurmJob]] = {}
    for job in state.jobs:  # one that several partitions may take waits in each of them
        for name in job.partition.split(","):
            jobs_of.setdefault(name, []).append(job)
    queues = []
    for partition in state.partitions:
        own = [nodes[name] for name in hostlist.expand(partition.node_list)]
        usable = [node for node in own if not _is_unusable(node)]
        jobs = jobs_of.get(partition.partition, [])
        pending = [job for job in jobs if job.state == "PENDING"]
        reasons = Counter(job.reason for job in pending if job.reason)
        queues.append(
            Queue(
                partition=partition.partition,
                state=partition.state,
                nodes=len(own),
                idle=sum(node.state == "idle" for node in usable),
                unusable=len(own) - len(usable),
                gpus=sum(node.gpus for node in own),
                gpus_used=sum(node.gpus_allocated or 0 for node in own),
                running=sum(job.state == "RUNNING" for job in jobs),
                pending=len(pending),
                reason=", ".join(f"{reason} {count}" for reason, count in reasons.most_common(2)),
            )
        )
    return tuple(queues)


def make_feeds(names: Sequence[str] = ()) -> list[SiteFeeds]:
    """Return the feeds of these sites; without names, of every site of this machine that has Slurm or a folder of runs.

    A site whose file is wrong has its problem in place of feeds. Raises UsageError for a name that is no site.
    """
    feeds = []
    for name in dict.fromkeys(names) or load.site_names():
        try:
            site = load.load_site(name)
        except PitError as error:
            if names:
                raise
            feeds.append(SiteFeeds(name, problem=error))
            continue
        # RFC 2606 reserves these names: such a file is a template, not a site.
        is_template = site.connection.host.endswith((".example", ".invalid"))
        if names or not (is_template or (site.scheduler == "none" and missing_runs_dir(site))):
            feeds.append(SiteFeeds(name, site))
    return feeds
