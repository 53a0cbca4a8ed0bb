"""Keep at each root the versions that a policy selects: stage the missing ones, then evict those of earlier runs.

New versions are staged before old ones are evicted: if a source fails, the old data stay. At a root with any error
nothing is evicted. Kept sets are leased until the run ends: under a quota the rules would otherwise evict each other's
sets, different ones in each run. A run evicts, also to make room, only sets that runs of the same policy staged, and
never one that is leased, pinned, selected by another policy, or staged by a rule that now applies to other nodes.
A policy whose file is gone selects nothing; what its runs staged belongs to the policy with a rule of the same name and
source, as after the file was renamed.
    <root>/.locks/.sync.<policy>            flock of the active run
    <root>/.records/.sync.<policy>.json     the versions its runs staged, and those it selects
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from pitools.core.errors import ClusterError, ConfigError, PitError, TryLater, UsageError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import describe_owner, lock_within, open_readable_lock_file, publish_owner, read_lock_owner
from pitools.core.progress import progress_bar
from pitools.core.record import Record, decode_json
from pitools.stage.cache import records
from pitools.stage.cache.evict import Eviction, EvictionCandidate, KeptReason, evict_item
from pitools.stage.cache.inventory import dataset_name, matches_sizes
from pitools.stage.cache.layout import LOCKS, RECORDS, create_root, free_bytes, staged_path
from pitools.stage.cache.lease import leased_set
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.stage.sync.metrics import SyncTotals
from pitools.stage.sync.policy import Rule, SyncPolicy
from pitools.stage.sync.versions import SourceVersion, fit_cap, newest_versions

Action = Literal["staged", "repaired", "evicted", "stage", "evict"]

# The worst first: wrong data need a person, errors of the last kind may pass by themselves.
EXIT_CODE_ORDER = (5, 3, 4, 75)
# Forked workers of a killed run hold its lock, too, until they end.
_KILLED_RUN_S = 1.0
# Each takes a descriptor, of which a process has 1024 by default.
_MAX_LEASES = 500


class SyncChange(Record, frozen=True, kw_only=True, tag="pit.stage-sync/1"):
    """One change, or with a dry run one that would be made (`stage`, `evict`). bytes: of all files of the version."""

    rule: str
    dataset: str
    version: str
    action: Action
    bytes: int
    copied_bytes: int
    wall_s: float
    source: str
    path: str
    node: str


class SyncState(Record, frozen=True, kw_only=True, tag="pit.stage-sync-state/1"):
    """The versions that runs of a policy staged at a root, with their rules. wanted_versions: selected by the last run.
    policy: its file.
    """

    policy: str = ""
    versions: dict[str, str] = {}
    wanted_versions: list[str] = []


class SyncRunning(TryLater):
    """Another run of the same policy is active at one of its roots."""


class SyncRun:
    """One run. Call it inside `sync_lock`. errors: of failed rules; the other rules are still applied."""

    def __init__(
        self,
        policy: SyncPolicy,
        *,
        on_change: Callable[[SyncChange], None],
        on_error: Callable[[str, PitError], None],
        dry_run: bool = False,
        timeout_s: float = 600,
        show_progress: bool = False,
    ) -> None:
        """on_change, on_error: called as it happens. timeout_s: of waiting for other stagers."""
        self.policy, self.errors, self._on_error = policy, list[PitError](), on_error
        self.kept_by_rule = {rule.name: (0, 0) for rule in policy.rules if rule.applies}
        self.counts: Counter[str] = Counter()
        self._leases = contextlib.ExitStack()
        self._on_change, self._dry_run, self._timeout_s, self._show_progress = (
            on_change,
            dry_run,
            timeout_s,
            show_progress,
        )

    def __call__(self) -> None:
        """Sync every root that rules of this node name."""
        for root, rules in _by_root(self.policy).items():
            with self._catch_errors(rules[0].name, root), contextlib.ExitStack() as self._leases:
                self._sync(root, rules)

    def exit_code(self) -> int:
        """Return 0, or the exit code of the worst error."""
        codes = {error.exit_code for error in self.errors}
        return next((code for code in EXIT_CODE_ORDER if code in codes), max(codes, default=0))

    def totals(self) -> SyncTotals:
        """Return the totals of the run, for metrics."""
        free = {}
        for root in _by_root(self.policy):
            with contextlib.suppress(PitError):
                free[str(root)] = free_bytes(root)
        errors = Counter(error.exit_code for error in self.errors)
        counts = self.counts
        return SyncTotals(
            staged=counts["staged"] + counts["repaired"],
            copied_bytes=counts["copied_bytes"],
            evicted=counts["evicted"],
            evicted_bytes=counts["evicted_bytes"],
            kept_by_rule=self.kept_by_rule,
            free=free,
            errors=errors,
        )

    def _sync(self, root: Path, rules: list[Rule]) -> None:
        _require_mounted(rules)
        if not self._dry_run:
            create_root(root, shared=rules[0].shared)
        previous = _read_state(_state_path(root, self.policy))
        inherited, old_states = _inherit(root, self.policy, rules)
        owned, wanted, errors_before = inherited | previous.versions, set[str](), len(self.errors)
        for rule in rules:
            with self._catch_errors(rule.name, root):
                for version in self._select_versions(rule):
                    with self._catch_errors(rule.name, root):
                        self._stage_and_lease(rule, version, owned, wanted)
        if len(self.errors) > errors_before:
            wanted |= set(previous.wanted_versions)  # a failed rule may still select them
        else:
            self._evict(root, owned, wanted)
        if not self._dry_run and (owned, sorted(wanted)) != (previous.versions, previous.wanted_versions):
            self._write_state(root, owned, wanted)
        if not self._dry_run:
            for path, rest in old_states.items():
                if rest.versions:
                    write_atomic(path, msgspec.json.encode(rest) + b"\n", mode=0o600)
                else:
                    path.unlink(missing_ok=True)

    @contextmanager
    def _catch_errors(self, rule: str, where: Path) -> Iterator[None]:
        try:
            yield
        except UsageError as error:  # of a value in the policy
            self._fail(rule, ConfigError(error.message, where=error.where, hint=error.hint))
        except PitError as error:
            self._fail(rule, error)
        except OSError as error:
            self._fail(rule, from_os_error(error, where))

    def _fail(self, rule: str, error: PitError) -> None:
        self.errors.append(error)
        self._on_error(rule, error)

    def _select_versions(self, rule: Rule) -> list[SourceVersion]:
        def size(version: SourceVersion) -> int:
            return load_version(version.location).manifest.total_bytes

        failed = partial(self._fail, rule.name)
        return fit_cap(rule, newest_versions(rule, failed), size, failed)

    def _stage_and_lease(self, rule: Rule, version: SourceVersion, owned: dict[str, str], wanted: set[str]) -> None:
        dataset = load_version(version.location)
        if dataset.version in wanted:
            return  # another rule's
        wanted.add(dataset.version)
        path, n_bytes = staged_path(rule.root, dataset.version), dataset.manifest.total_bytes
        if self._dry_run:
            if not matches_sizes(path, dataset):
                self._report(rule.name, "stage", path, dataset.manifest.name, n_bytes, dataset.source.label)
        else:
            if not os.path.lexists(path) and dataset.version not in owned:
                # Before the first byte: after a kill the next run must recognise the set as its own.
                owned[dataset.version] = rule.name
                self._write_state(rule.root, owned, wanted)
            evictable = {} if matches_sizes(path, dataset) else self._describe_evictable(rule.root, owned, wanted)

            def on_evicted(eviction: Eviction) -> None:
                evicted = Path(eviction.path)
                if evicted == staged_path(rule.root, eviction.version):  # not a partial copy
                    name, record = evictable[eviction.version]
                    owner = owned.pop(eviction.version)
                    self._report(owner, "evicted", evicted, name, record.bytes, record.source)

            with (
                progress_bar(dataset.manifest.name, n_bytes) if self._show_progress else nullcontext(_no_bar) as advance
            ):
                result = stage_version(
                    dataset,
                    rule.root,
                    timeout_s=self._timeout_s,
                    limits=structs.replace(rule.limits, evictable=frozenset(evictable)),
                    shared=rule.shared,
                    advance=advance,
                    on_evicted=on_evicted,
                )
            if sum(sets for sets, _ in self.kept_by_rule.values()) < _MAX_LEASES:
                self._leases.enter_context(leased_set(path, touch=False))
            if result.state != "present":
                self._report(
                    rule.name,
                    result.state,
                    path,
                    result.dataset,
                    n_bytes,
                    result.source,
                    result.copied_bytes,
                    result.wall_s,
                )
        sets, total = self.kept_by_rule[rule.name]
        self.kept_by_rule[rule.name] = sets + 1, total + n_bytes

    def _describe_evictable(
        self, root: Path, owned: dict[str, str], wanted: set[str]
    ) -> dict[str, tuple[str, records.StageRecord]]:
        """Return the versions that this policy may evict, each with its dataset's name and its record."""
        other_node_rules = {rule.name for rule in self.policy.rules if not rule.applies}
        keep = wanted | _wanted_by_others(root, self.policy)
        return {
            version: (dataset_name(staged_path(root, version)), records.read_stage_record(root, version))
            for version, rule in sorted(owned.items())
            if version not in keep and rule not in other_node_rules
        }

    def _evict(self, root: Path, owned: dict[str, str], wanted: set[str]) -> None:
        for version, (name, record) in self._describe_evictable(root, owned, wanted).items():
            path, rule = staged_path(root, version), owned[version]
            errors_before, is_present = len(self.errors), os.path.lexists(path)
            with self._catch_errors(rule, path):
                reason = (
                    evict_item(root, EvictionCandidate(version, path), dry_run=self._dry_run)
                    if is_present
                    else KeptReason.NOT_PRESENT
                )
            if len(self.errors) > errors_before or reason not in (None, KeptReason.NOT_PRESENT):
                continue
            if not reason:
                self._report(rule, "evict" if self._dry_run else "evicted", path, name, record.bytes, record.source)
            del owned[version]

    def _report(
        self,
        rule: str,
        action: Action,
        path: Path,
        dataset: str,
        n_bytes: int,
        source: str,
        copied_bytes: int = 0,
        wall_s: float = 0.0,
    ) -> None:
        self.counts.update({action: 1, f"{action}_bytes": n_bytes, "copied_bytes": copied_bytes})
        self._on_change(
            SyncChange(
                rule=rule,
                dataset=dataset,
                version=path.name,
                action=action,
                bytes=n_bytes,
                copied_bytes=copied_bytes,
                wall_s=wall_s,
                source=source,
                path=str(path),
                node=self.policy.node,
            )
        )

    def _write_state(self, root: Path, owned: dict[str, str], wanted: set[str]) -> None:
        record = SyncState(policy=str(self.policy.path), versions=owned, wanted_versions=sorted(wanted))
        write_atomic(_state_path(root, self.policy), msgspec.json.encode(record) + b"\n", mode=0o600)


@contextmanager
def sync_lock(policy: SyncPolicy) -> Iterator[None]:
    """Hold the policy's lock at each of its roots, so that only one run is active.

    Roots that cannot be locked are skipped: the run reports their error. Raises SyncRunning.
    """
    with contextlib.ExitStack() as stack:
        for root, rules in sorted(_by_root(policy).items()):
            try:
                _require_mounted(rules)
                create_root(root, shared=rules[0].shared)
                descriptor = open_readable_lock_file(root / LOCKS / f".sync.{policy.id}")
                stack.callback(os.close, descriptor)
                is_locked = lock_within(descriptor, fcntl.LOCK_EX, timeout_s=_KILLED_RUN_S)
            except (PitError, OSError):
                continue
            if not is_locked:
                owner = read_lock_owner(descriptor)
                raise SyncRunning(f"another run of this policy is active: {describe_owner(owner)}", where=str(root))
            stack.enter_context(publish_owner(descriptor))
        yield


def _require_mounted(rules: list[Rule]) -> None:
    """Refuse to create a root on the system's disk in place of one that is not mounted. Raises ClusterError."""
    for rule in rules:
        if rule.disk and not os.path.ismount(rule.disk):
            raise ClusterError("the disk is not mounted", where=str(rule.disk), hint=f"mount {rule.disk}")


def _by_root(policy: SyncPolicy) -> dict[Path, list[Rule]]:
    """Return the rules that apply to this node, by root."""
    rules_by_root: dict[Path, list[Rule]] = {}
    for rule in policy.rules:
        if rule.applies:
            rules_by_root.setdefault(rule.root, []).append(rule)
    return rules_by_root


def _state_path(root: Path, policy: SyncPolicy) -> Path:
    return root / RECORDS / f".sync.{policy.id}.json"


def _read_state(path: Path) -> SyncState:
    """Read the state; an empty one if it cannot be read: then nothing is evicted."""
    try:
        return decode_json(path.read_bytes(), SyncState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return SyncState()


def _wanted_by_others(root: Path, policy: SyncPolicy) -> set[str]:
    states = _states_of_others(root, policy).values()
    return {version for state in states if not _is_gone(state) for version in state.wanted_versions}


def _inherit(root: Path, policy: SyncPolicy, rules: list[Rule]) -> tuple[dict[str, str], dict[Path, SyncState]]:
    """Return the versions, with their rules, that a policy takes over from policies whose file is gone, and what their
    states are then: the other versions are left to other policies.
    """
    sources = {rule.name: f"{rule.source}/" for rule in rules}
    versions, states = dict[str, str](), dict[Path, SyncState]()
    for path, state in _states_of_others(root, policy).items():
        own = {
            version: rule
            for version, rule in (state.versions if _is_gone(state) else {}).items()
            if rule in sources and records.read_stage_record(root, version).source.startswith(sources[rule])
        }
        if own:
            versions |= own
            rest = {version: rule for version, rule in state.versions.items() if version not in own}
            rest = {version: rule for version, rule in rest.items() if os.path.lexists(staged_path(root, version))}
            states[path] = structs.replace(state, versions=rest)
    return versions, states


def _is_gone(state: SyncState) -> bool:
    """Whether the file of a policy is gone; not where its folder is too, as on a file system that is not mounted."""
    file = Path(state.policy)
    return bool(state.policy) and not os.path.lexists(file) and file.parent.is_dir()


def _states_of_others(root: Path, policy: SyncPolicy) -> dict[Path, SyncState]:
    own_path = _state_path(root, policy)
    return {path: _read_state(path) for path in sorted(own_path.parent.glob(".sync.*.json")) if path != own_path}


def _no_bar(_: int) -> None:
    pass
