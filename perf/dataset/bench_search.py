"""A search among 10,000 versions: the whole command, and the search alone, against reading every manifest.

perf/run dataset_search [--quick] [--rounds 9] [--memory /dev/shm]

100 datasets of 100 versions, each manifest of 60 files, 12 arrays and 5 instructions. Warm means that the index is
there and nothing changed; then one version is published before each search. The first search, which makes the index,
is told as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from perf.harness.harness import compare, from_ratios, interleave, report
from perf.harness.workspace import arguments, print_progress, workspace
from pitools.dataset.catalog import index, search
from pitools.store import manifest as manifests
from pitools.store.manifest import ArraySchema, FileEntry, Manifest

PIT = Path(sys.executable).parent / "pit"
LIMIT_S = 0.1
WHERE = ("instruction~drawer 7", "episodes>=150", "array=obs/*_image", "published>=2020-01-01")
ARRAYS = (
    "action",
    "reward",
    "done",
    *(f"obs/camera_{i}_image" for i in range(4)),
    *(f"obs/state_{i}" for i in range(5)),
)


def publish(root: Path, name: str, number: int) -> None:
    """One version, as far as its manifest goes."""
    digest = f"xxh3_128:{number:032x}"
    files = sorted(f"{array}/c/{shard}" for array in ARRAYS for shard in range(5))
    manifest = Manifest(
        name=name,
        episodes=100 + number % 100,
        steps=10_000,
        parent=f"{number:032x}",
        arrays={array: ArraySchema(shape=(10_000, 7), dtype="float32") for array in ARRAYS},
        files=tuple(FileEntry(path=path, bytes=1 << 20, digest=digest) for path in files),
        recordings=({"file": f"take_{number}.hdf5", "bytes": 1 << 30, "digest": digest, "layout": "robomimic"},),
        instructions={f"open the drawer {number % 50 + i}": 20 for i in range(5)},
    )
    data = manifests.encode_manifest(manifest)
    folder = root / name / manifests.version_of(data)
    folder.mkdir(parents=True)
    (folder / manifests.MANIFEST_FILE).write_bytes(data)


def command(root: Path, env: dict[str, str]) -> None:
    words = [text for condition in WHERE for text in ("--where", condition)]
    done = subprocess.run([PIT, "dataset", "list", root, *words], env=env, capture_output=True, check=True)
    if not done.stdout:
        sys.exit("nothing was found")


def alone(root: Path) -> list[search.VersionListing]:
    return search.list_versions(root, WHERE)[0]


def by_reading(root: Path) -> int:
    """What a search costs without an index: every manifest decoded."""
    actual = 0
    for path in root.glob("*/*/manifest.json"):
        manifest = manifests.decode_manifest(path.read_bytes(), str(path))
        has_instruction = any("drawer 7" in text for text in manifest.instructions or ())
        actual += (
            manifest.episodes >= 150 and has_instruction and any(name.endswith("_image") for name in manifest.arrays)
        )
    return actual


def main() -> int:
    args = arguments(__doc__)
    names, each = (20, 50) if args.quick else (100, 100)
    count = names * each
    with workspace(args.memory, needed=count * 40_000) as home:
        root, cache = home / "root", home / "cache"
        for number in range(count):
            publish(root, f"set-{number % names}", number)
        time.sleep(2.5)  # a folder that changed just now is not believed
        os.environ["XDG_CACHE_HOME"] = str(cache)
        env = dict(os.environ)
        began = time.perf_counter()
        command(root, env)
        print_progress(f"the first search, which makes the index: {time.perf_counter() - began:.2f} s")
        print_progress(
            f"the index has {index.index_path(root).stat().st_size / 1e6:.1f} MB; {len(alone(root))} versions are found"
        )
        if len(alone(root)) != by_reading(root):
            sys.exit("the index finds something else than the manifests say")
        times = interleave(
            args.rounds,
            {
                "command": lambda: command(root, env),
                "alone": lambda: alone(root),
                "python": lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
                "pit": lambda: subprocess.run([PIT, "dataset", "list", "--help"], capture_output=True, check=True),
            },
        )
        for name, took in times.items():
            print_progress(f"  {name}: {min(took) * 1e3:.1f} to {max(took) * 1e3:.1f} ms")
        reading = interleave(1 if args.quick else 3, {"reading": lambda: by_reading(root)})["reading"]
        spent = []
        for number in range(3):
            publish(root, f"set-{number}", count + number)
            began = time.perf_counter()
            command(root, env)
            spent.append(time.perf_counter() - began)
        shutil.rmtree(cache)
        case = f"search {count:,} versions"
        pairs = len(reading)
        return report(
            [
                from_ratios(
                    f"{case}: the command, warm",
                    "limit 100 ms",
                    "",
                    [LIMIT_S / t for t in times["command"]],
                    target=1.0,
                ),
                from_ratios(
                    f"{case}: without the start of `pit`",
                    "limit 100 ms",
                    "",
                    [LIMIT_S / t for t in times["alone"]],
                    target=1.0,
                ),
                from_ratios(
                    f"{case}: the command, one version new",
                    "limit 100 ms",
                    "",
                    [LIMIT_S / t for t in spent],
                    target=1.0,
                ),
                compare(
                    f"{case}: without the start of `pit`",
                    "reading every manifest",
                    "msgspec",
                    times["alone"][:pairs],
                    reading,
                    target=20.0,
                ),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
