"""Keep at each root what the rules of a policy want: stage what is missing, then remove what they brought before.

First the new, then the old away: a source that fails leaves yesterday's data. A root where anything failed loses
nothing. What is kept is leased until the run ends: under a quota rules must not push out each other's sets, another
one in each run. Only what a run of the same policy brought is ever removed, and never what is leased, pinned or wanted
by another policy, or was brought by a rule that is now for other nodes.
    <root>/.locks/.sync.<policy>            flock of the run that is at work
    <root>/.records/.sync.<policy>.json     what its runs brought, and what it wants
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

from pitools.core.errors import ConfigError, PitError, TryLater, UsageError
from pitools.core.fs import os_error, write_atomic
from pitools.core.lock import announced, flock, open_kept, read_holder, who
from pitools.core.progress import bar
from pitools.core.record import Record, decode_json
from pitools.stage.cache import records
from pitools.stage.cache.evict import Item, KeptReason, evict
from pitools.stage.cache.inventory import looks_whole
from pitools.stage.cache.layout import LOCKS, RECORDS, free_bytes, object_path, prepare
from pitools.stage.cache.lease import lease
from pitools.stage.sources.open import load
from pitools.stage.stage import stage
from pitools.stage.sync.metrics import Totals
from pitools.stage.sync.policy import Policy, Rule
from pitools.stage.sync.versions import Version, newest, within_cap

Action = Literal["staged", "repaired", "evicted", "stage", "evict"]

# Data that is wrong comes first: somebody must look at it; what may pass by itself comes last.
WORST = (5, 3, 4, 75)
# Workers of a run that was killed have its lock too, until the kernel has ended them.
_LAST_BREATH_S = 1.0
# A descriptor each, of which a process may have 1024 where nobody has said otherwise.
_MOST_LEASES = 500


class Change(Record, frozen=True, kw_only=True, tag="pit.stage-sync/1"):
    """One change, or with a dry run what would be one (`stage`, `evict`). bytes: of all files of the version."""

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


class Brought(Record, frozen=True, kw_only=True, tag="pit.stage-brought/1"):
    """What the runs of a policy brought to a root: the rule by version. wanted: at its last run. policy: the file."""

    policy: str = ""
    versions: dict[str, str] = {}
    wanted: list[str] = []


class Running(TryLater):
    """Another run of the same policy is at work at one of its roots."""


class Sync:
    """One run. Call it inside `alone`; what failed is in `errors`, and the others went on."""

    def __init__(
        self,
        policy: Policy,
        *,
        changed: Callable[[Change], None],
        failed: Callable[[str, PitError], None],
        dry_run: bool = False,
        timeout_s: float = 600,
        show: bool = False,
    ) -> None:
        """changed, failed: called at once. timeout_s: to wait for others that stage. show: progress bars."""
        self.policy, self.errors, self._failed = policy, list[PitError](), failed
        self.kept = {rule.name: (0, 0) for rule in policy.rules if rule.applies}
        self.counted: Counter[str] = Counter()
        self._leases = contextlib.ExitStack()
        self._changed, self._dry_run, self._timeout_s, self._show = changed, dry_run, timeout_s, show

    def __call__(self) -> None:
        """Sync every root that rules of this node name."""
        for root, rules in _by_root(self.policy).items():
            with self._trying(rules[0].name, root), contextlib.ExitStack() as self._leases:
                self._sync(root, rules)

    def exit_code(self) -> int:
        """0, or the worst of what failed."""
        codes = {error.exit_code for error in self.errors}
        return next((code for code in WORST if code in codes), max(codes, default=0))

    def totals(self) -> Totals:
        """What the run did, for metrics."""
        free = {}
        for root in _by_root(self.policy):
            with contextlib.suppress(PitError):
                free[str(root)] = free_bytes(root)
        errors = Counter(error.exit_code for error in self.errors)
        count = self.counted
        return Totals(
            staged=count["staged"] + count["repaired"],
            copied_bytes=count["copied_bytes"],
            evicted=count["evicted"],
            evicted_bytes=count["evicted_bytes"],
            kept=self.kept,
            free=free,
            errors=errors,
        )

    def _sync(self, root: Path, rules: list[Rule]) -> None:
        if not self._dry_run:
            prepare(root, shared=rules[0].shared)
        before = _read(_state_path(root, self.policy))
        brought, wanted, failed = dict(before.versions), set[str](), len(self.errors)
        for rule in rules:
            with self._trying(rule.name, root):
                for version in self._choose(rule):
                    with self._trying(rule.name, root):
                        self._keep(rule, version, brought, wanted)
        if len(self.errors) > failed:
            wanted |= set(before.wanted)  # what could not be judged is not given up
        else:
            self._evict(root, brought, wanted)
        if not self._dry_run and (brought, sorted(wanted)) != (before.versions, before.wanted):
            self._write(root, brought, wanted)

    @contextmanager
    def _trying(self, rule: str, where: Path) -> Iterator[None]:
        try:
            yield
        except UsageError as error:  # of what stands in the policy: there is no command line to be wrong
            self._fail(rule, ConfigError(error.what, where=error.where, hint=error.hint))
        except PitError as error:
            self._fail(rule, error)
        except OSError as error:
            self._fail(rule, os_error(error, where))

    def _fail(self, rule: str, error: PitError) -> None:
        self.errors.append(error)
        self._failed(rule, error)

    def _choose(self, rule: Rule) -> list[Version]:
        def size(version: Version) -> int:
            return load(version.place).manifest.total_bytes

        failed = partial(self._fail, rule.name)
        return within_cap(rule, newest(rule, failed), size, failed)

    def _keep(self, rule: Rule, version: Version, brought: dict[str, str], wanted: set[str]) -> None:
        dataset = load(version.place)
        if dataset.version in wanted:
            return  # another rule's
        wanted.add(dataset.version)
        path, n_bytes = object_path(rule.root, dataset.version), dataset.manifest.total_bytes
        if self._dry_run:
            if not looks_whole(path, dataset):
                self._say(rule.name, "stage", path, dataset.manifest.name, n_bytes, dataset.source.label)
        else:
            if not os.path.lexists(path) and dataset.version not in brought:
                # Before its first byte: a run that is killed must know the set for its own the next time.
                brought[dataset.version] = rule.name
                self._write(rule.root, brought, wanted)
            with bar(dataset.manifest.name, n_bytes) if self._show else nullcontext(_no_bar) as advance:
                done = stage(
                    dataset,
                    rule.root,
                    timeout_s=self._timeout_s,
                    limits=rule.limits,
                    shared=rule.shared,
                    advance=advance,
                )
            if sum(sets for sets, _ in self.kept.values()) < _MOST_LEASES:
                self._leases.enter_context(lease(path, use=False))
            if done.state != "present":
                self._say(
                    rule.name, done.state, path, done.dataset, n_bytes, done.source, done.copied_bytes, done.wall_s
                )
        sets, total = self.kept[rule.name]
        self.kept[rule.name] = sets + 1, total + n_bytes

    def _evict(self, root: Path, brought: dict[str, str], wanted: set[str]) -> None:
        elsewhere = {rule.name for rule in self.policy.rules if not rule.applies}
        stay = wanted | _wanted_by_others(root, self.policy)
        for version, rule in sorted(brought.items()):
            if version in stay or rule in elsewhere:
                continue
            path, record = object_path(root, version), records.read(root, version)
            name, failed, is_there = _name(path), len(self.errors), os.path.lexists(path)
            with self._trying(rule, path):
                reason = evict(root, Item(version, path), dry_run=self._dry_run) if is_there else KeptReason.NOT_PRESENT
            if len(self.errors) > failed or reason not in (None, KeptReason.NOT_PRESENT):
                continue
            if not reason:
                self._say(rule, "evict" if self._dry_run else "evicted", path, name, record.bytes, record.source)
            del brought[version]

    def _say(
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
        self.counted.update({action: 1, f"{action}_bytes": n_bytes, "copied_bytes": copied_bytes})
        self._changed(
            Change(
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

    def _write(self, root: Path, brought: dict[str, str], wanted: set[str]) -> None:
        record = Brought(policy=str(self.policy.path), versions=brought, wanted=sorted(wanted))
        write_atomic(_state_path(root, self.policy), msgspec.json.encode(record) + b"\n", mode=0o600)


@contextmanager
def alone(policy: Policy) -> Iterator[None]:
    """Hold the policy's lock at each of its roots, so that a run that takes long is not joined by the next.

    A root that cannot be locked is left to the run, which will say why. Raises Running.
    """
    with contextlib.ExitStack() as stack:
        for root, rules in sorted(_by_root(policy).items()):
            try:
                prepare(root, shared=rules[0].shared)
                descriptor = open_kept(root / LOCKS / f".sync.{policy.id}")
                stack.callback(os.close, descriptor)
                had = flock(descriptor, fcntl.LOCK_EX, timeout_s=_LAST_BREATH_S)
            except (PitError, OSError):
                continue
            if not had:
                holder = read_holder(descriptor)
                raise Running(f"another run of this policy is at work: {who(holder)}", where=str(root))
            stack.enter_context(announced(descriptor))
        yield


def _by_root(policy: Policy) -> dict[Path, list[Rule]]:
    """The rules that count on this node."""
    found: dict[Path, list[Rule]] = {}
    for rule in policy.rules:
        if rule.applies:
            found.setdefault(rule.root, []).append(rule)
    return found


def _state_path(root: Path, policy: Policy) -> Path:
    return root / RECORDS / f".sync.{policy.id}.json"


def _read(path: Path) -> Brought:
    """What was brought; nothing where that is not known: then nothing is removed."""
    try:
        return decode_json(path.read_bytes(), Brought)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Brought()


def _wanted_by_others(root: Path, policy: Policy) -> set[str]:
    mine = _state_path(root, policy)
    return {version for path in mine.parent.glob(".sync.*.json") if path != mine for version in _read(path).wanted}


def _name(path: Path) -> str:
    try:
        return load(path).manifest.name
    except (PitError, OSError):
        return ""


def _no_bar(_: int) -> None:
    pass
