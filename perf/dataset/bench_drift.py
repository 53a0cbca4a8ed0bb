"""Appends that the drift gate refuses: of healthy episodes hardly any, of episodes with a fault nearly all.

python -m perf.dataset.bench_drift [--quick] [--only bridge,reach] [--table]

Random episodes of one recording are the parent, others of the same recording are appended, as they are or with a fault,
and the gate that `pit dataset ingest --append` asks is asked, by the manifests that such versions would have. A case is
a recording: the share of healthy appends that are taken, or of faults that are refused, at the number of episodes added
for which it is least, over all sizes of parent; --table shows each number on stderr.

The gate's constants were chosen on `bridge` (real, ../shared/data: its first thirteen episodes), `reach` (of
scripts/examples) and real recordings that the package aeon brings (`pip install --no-deps aeon`): `BasicMotions` of a
smart watch, `JapaneseVowels`, `PickupGestureWiimoteZ`; for joints at rest also on other tasks of metaworld. They were
left as they are for `bridge-2`, the other episodes, and for `metaworld:<task>`, an expert's episodes in MuJoCo, if
that package is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO
from pitools.dataset.check import check_drift
from pitools.dataset.ingest.statistics import FRAME_SAMPLE_STEP
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, Manifest, Statistics

PARENTS, APPENDS = (1, 2, 3, 5, 10, 20, 50, 150), (1, 2, 3, 5, 10, 20)
TASKS = ("hammer-v3", "button-press-v3", "shelf-place-v3", "dial-turn-v3", "window-open-v3")
CAMERA = "obs/eye_image"
# Fewer episodes say nothing of a fault: new ones of a joint that rests, or, of 10 steps each, of a camera, of which one
# frame in 32 is looked at; and a parent's of one column alone, or of a smaller factor.
LEAST_NEW = {"dead joint": 5, "dark": 5, "bright": 5, "x0.1": 5}
LEAST_KNOWN = {"x57.3 of one column": 5, "x10": 5, "x0.1": 5}
Floats = NDArray[np.float64]
Episode = dict[str, Floats]  # (steps, columns) by array; of a camera, (steps, H, W, 3)


class Sums(NamedTuple):
    """What the statistics of any choice of episodes follow from: (episodes,) and (episodes, columns)."""

    rows: Floats
    total: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, episodes: list[Floats]) -> Sums:
        """Those of each episode."""
        rows = np.array([[len(values)] for values in episodes], np.float64)
        items = [values.reshape(len(values), -1, values.shape[-1]) for values in episodes]
        means = ([each.mean(1).sum(0), (each**2).mean(1).sum(0), each.min((0, 1)), each.max((0, 1))] for each in items)
        return cls(rows, *(np.array(each) for each in zip(*means, strict=True)))

    def statistics(self, chosen: NDArray[np.intp] | slice = slice(None)) -> Statistics:
        """As a manifest says them of these episodes."""
        rows, low, high = self.rows[chosen].sum(), self.low[chosen].min(0), self.high[chosen].max(0)
        mean = np.where(low == high, low, self.total[chosen].sum(0) / rows)
        square = np.where(low == high, 0, self.squares[chosen].sum(0) / rows - mean**2)
        numbers = (low, high, mean, np.sqrt(np.maximum(square, 0)))
        names = ("minimum", "maximum", "mean", "deviation")
        return Statistics(rows=int(rows), **dict(zip(names, (tuple(row.tolist()) for row in numbers), strict=True)))

    def and_(self, other: Sums) -> Sums:
        """Of these episodes and others."""
        return Sums(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def manifest(arrays: dict[str, Sums], parent: Manifest | None = None) -> Manifest:
    """Of a version of these episodes, which may be one that appends to a parent."""
    steps = int(arrays["action"].rows.sum())
    reference = {name: sums.statistics() for name, sums in arrays.items()}
    return Manifest(
        name="x",
        episodes=len(arrays["action"].rows),
        steps=steps,
        files=(),
        statistics=reference,
        arrays={
            name: ArraySchema(
                shape=(steps, 8, 8, 3) if name == CAMERA else (steps, len(told.mean)),
                dtype="uint8" if name == CAMERA else "float64",
            )
            for name, told in reference.items()
        },
        recordings=({"file": "a"}, {"file": "b"})[: 1 + bool(parent)],
        parent=manifests.version_of(manifests.encode_manifest(parent)) if parent else "",
    )


def looked_at(name: str, episodes: list[Episode], first: int) -> list[Floats]:
    """What an ingest's statistics are of: all steps, but of a camera one frame in so many, by its number in all."""
    values = [episode[name] for episode in episodes]
    if name != CAMERA:
        return values
    frames = np.concatenate(values)[-first % FRAME_SAMPLE_STEP :: FRAME_SAMPLE_STEP]
    return [frames] if len(frames) else []


def refused(parent: list[Episode], added: list[Episode]) -> list[str]:
    """The checks for which an append is refused."""
    steps = sum(len(episode["action"]) for episode in parent)
    before = {name: Sums.of(looked_at(name, parent, 0)) for name in parent[0]}
    new = {name: looked_at(name, added, steps) for name in parent[0]}
    after = {name: sums.and_(Sums.of(new[name])) if new[name] else sums for name, sums in before.items()}
    reference = manifest(before)
    return [
        f"{item.check} {item.array}"
        for item in check_drift(manifest(after, reference), reference)
        if item.level == "fault"
    ]


def scaled(factor: float, *, one: bool = False) -> Callable[[list[Episode], np.random.Generator], list[Episode]]:
    """Actions in another unit: all columns, or one of those that move."""

    def change(episodes: list[Episode], rng: np.random.Generator) -> list[Episode]:
        factors = np.full(episodes[0]["action"].shape[1], factor)
        if one:
            factors = np.where(np.arange(len(factors)) == _moving(episodes, rng), factor, 1)
        return [{**episode, "action": episode["action"] * factors} for episode in episodes]

    return change


def dead(episodes: list[Episode], rng: np.random.Generator) -> list[Episode]:
    """One column of the actions that moves stays at the value that it has first."""
    column, stuck = _moving(episodes, rng), []
    for episode in episodes:
        values = episode["action"].copy()
        values[:, column] = episodes[0]["action"][0, column]
        stuck.append({**episode, "action": values})
    return stuck


def light(change: Callable[[Floats], Floats]) -> Callable[[list[Episode], np.random.Generator], list[Episode]]:
    """A camera in another light."""
    return lambda episodes, _: [{**one, CAMERA: np.clip(change(one[CAMERA]), 0, 255)} for one in episodes]


FAULTS = {
    "x1000": scaled(1000),
    "x57.3": scaled(57.3),
    "x10": scaled(10),
    "x0.1": scaled(0.1),
    "x57.3 of one column": scaled(57.3, one=True),
    "dead joint": dead,
    "dark": light(lambda grey: grey / 4),
    "bright": light(lambda grey: grey + 100),
}


def _moving(episodes: list[Episode], rng: np.random.Generator) -> int:
    """A column of the actions that moves in every episode."""
    moves = np.all([np.ptp(episode["action"], axis=0) > 0 for episode in episodes], axis=0)
    return int(rng.choice(np.flatnonzero(moves))) if moves.any() else 0


def bridge() -> list[Episode]:
    """Real episodes of a WidowX."""
    import h5py

    with h5py.File(REPO.parent / "shared/data/robot/bridge_widowx_robomimic.hdf5") as file:
        demos = [file[f"data/demo_{number}"] for number in range(len(file["data"]))]
        return [
            {
                "action": demo["actions"][:].astype(np.float64),
                "obs/state": demo["obs/robot0_proprio"][:],
                CAMERA: demo["obs/agentview_image"][:, ::8, ::8].astype(np.float64),
            }
            for demo in demos
        ]


def reach() -> list[Episode]:
    """A simulated planar arm's, of the examples."""
    sys.path.insert(0, str(REPO / "scripts/examples"))
    from make_recording import simulate

    value = simulate(400, 60, np.random.default_rng(0))
    return [
        {"action": action, "obs/state": state, "reward": reward[:, None].astype(np.float64)}
        for action, state, reward in zip(value["action"], value["proprio"], value["reward"], strict=True)
    ]


def series(folder: Path, name: str) -> list[Episode]:
    """A set of the package aeon, as its text files have it; both parts of it."""
    actual = []
    for part in ("TRAIN", "TEST"):
        text = (folder / f"datasets/data/{name}/{name}_{part}.ts").read_text().lower()
        for line in text.partition("@data")[2].split():
            columns = [[float(value) for value in values.split(",")] for values in line.split(":")[:-1]]
            actual.append({"action": np.array(columns).T})
    return actual


def expert(task: str) -> list[Episode]:
    """Episodes of metaworld's scripted policy."""
    import metaworld
    from metaworld.policies import ENV_POLICY_MAP

    ml1 = metaworld.ML1(task, seed=1)
    world, policy, rng = ml1.train_classes[task](), ENV_POLICY_MAP[task](), np.random.default_rng(0)
    actual = []
    for number in range(80):
        world.set_task(ml1.train_tasks[number % len(ml1.train_tasks)])
        world.seed(number)
        state, rows, after = world.reset()[0], [], 0
        while len(rows) < 200 and after < 10:
            action = np.clip(policy.get_action(state) + 0.05 * rng.normal(size=4), -1, 1)
            rows.append((action, state))
            state, *_, info = world.step(action)
            after += info["success"] > 0
        actual.append({"action": np.array([a for a, _ in rows]), "obs/state": np.array([s for _, s in rows])})
    return actual


def recordings(only: set[str]) -> Iterator[tuple[str, list[Episode]]]:
    """Every recording that is here, by name."""
    reference: dict[str, Callable[[], list[Episode]]] = {
        "bridge": lambda: bridge()[:13],
        "reach": reach,
        "bridge-2": lambda: bridge()[13:],
    }
    if aeon := importlib.util.find_spec("aeon"):
        folder = Path(str(aeon.origin)).parent
        for name in ("BasicMotions", "JapaneseVowels", "PickupGestureWiimoteZ"):
            reference[name] = lambda name=name: series(folder, name)
    if importlib.util.find_spec("metaworld"):
        reference |= {f"metaworld:{task}": lambda task=task: expert(task) for task in TASKS}
    for name, make in reference.items():
        if not only or name in only:
            yield name, make()


def trial(episodes: list[Episode], sizes: tuple[int, int], fault: str, rng: np.random.Generator) -> list[str]:
    """Why one append is refused: `sizes` are of parent and append, in episodes; fault: "" for a healthy one."""
    chosen = rng.permutation(len(episodes))[: sum(sizes)]
    parent, added = ([episodes[number] for number in part] for part in np.split(chosen, [sizes[0]]))
    return refused(parent, FAULTS[fault](added, rng) if fault else added)


def campaign(episodes: list[Episode], fault: str, count: int, rng: np.random.Generator) -> dict[int, list[list[str]]]:
    """Why each append is refused, by its number of episodes; so many of each size of parent that there is."""
    actual: dict[int, list[list[str]]] = {}
    for added, parent in itertools.product(APPENDS, PARENTS):
        least, least_known = LEAST_NEW.get(fault, 1), LEAST_KNOWN.get(fault, 1)
        if parent >= least_known and added >= least and parent + added <= len(episodes):
            each = (trial(episodes, (parent, added), fault, rng) for _ in range(count))
            actual.setdefault(added, []).extend(each)
    return actual


def main(argv: list[str]) -> int:
    """One case for each recording, and each kind of append."""
    count = 20 if "--quick" in argv else 200
    only = set(argv[argv.index("--only") + 1].split(",")) if "--only" in argv else set()
    cases: list[Case] = []
    for name, episodes in recordings(only):
        for fault in ("", *FAULTS):
            if fault in ("dark", "bright") and CAMERA not in episodes[0]:
                continue
            value = campaign(episodes, fault, count if not fault else max(1, count // 10), np.random.default_rng(1))
            if "--table" in argv:
                _table(name, fault, value)
            case = f"{fault}: least share refused" if fault else "healthy: least share taken"
            shares = [float(np.mean([bool(why) == bool(fault) for why in each])) for each in value.values()]
            cases.append(_case(f"{name}, {case}", shares, 0.95 if fault else 0.99))
    return report(cases)


def _case(case: str, shares: list[float], target: float) -> Case:
    """A case whose ratio is the share of the size of append for which it is least."""
    least = min(shares)
    return msgspec.structs.replace(
        from_ratios(case, "all", "", shares, target=target), ratio=round(least, 4), ok=least >= target
    )


def _table(name: str, fault: str, found: dict[int, list[list[str]]]) -> None:
    for added, each in found.items():
        why: dict[str, int] = {}
        for reasons in each:
            for reason in reasons:
                why[reason] = why.get(reason, 0) + 1
        share = sum(map(bool, each)) / len(each)
        print(
            f"{name:24} {fault or 'healthy':20} {added:3} episodes: {share:7.2%} of {len(each)} refused  "
            f"{dict(sorted(why.items(), key=lambda item: -item[1])[:4])}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
