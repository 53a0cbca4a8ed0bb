#!/usr/bin/env python3
"""Simulate a planar arm that reaches for discs, and write what its camera and joints saw in robomimic's HDF5 layout.

    python scripts/examples/make_recording.py reach.hdf5
    pit dataset ingest reach.hdf5 --to datasets --name reach

Each demo: obs/agentview_image (T, size, size, 3) uint8; obs/robot0_proprio (T, 7) = three joint angles [rad], tip x and
y [m], tip angle [rad], gripper opening [0, 1]; actions (T, 7) in [-1, 1] = the expert's three joint velocities, tip
velocity x and y, tip turn rate, gripper (1 closes). The expert is damped least-squares inverse kinematics towards the
disc. The arm is also disturbed, but the actions are the expert's own, so that a policy sees how to recover.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import h5py
import numpy as np

LINKS = np.array([0.42, 0.36, 0.24])  # metres
BASE = np.array([0.0, -0.62])
VIEW = 1.05  # the camera sees [-VIEW, VIEW] metres both ways
STEP_S = 0.1
MAX_JOINT, MAX_TIP, MAX_TURN = 1.5, 0.8, 4.5  # rad/s, m/s, rad/s: an action of 1
GAIN, DAMPING, NEAR = 2.5, 0.12, 0.05  # 1/s, metres, metres
COLOURS = {"red": (214, 52, 46), "green": (52, 160, 76), "blue": (48, 104, 206)}


def joints(angles):
    """Positions (E, 4, 2) of base, elbow, wrist and tip, and absolute link angles (E, 3), of joint angles (E, 3)."""
    heading = np.cumsum(angles, axis=1)
    steps = LINKS[:, None] * np.stack([np.cos(heading), np.sin(heading)], axis=2)
    return np.concatenate([np.zeros_like(steps[:, :1]), np.cumsum(steps, axis=1)], axis=1) + BASE, heading


def expert(points, target):
    """Joint velocities (E, 3) and tip velocities (E, 2) towards the target (E, 2), within the arm's limits."""
    error = target - points[:, 3]
    wish = GAIN * error
    wish *= np.minimum(1, MAX_TIP / np.maximum(np.linalg.norm(wish, axis=1, keepdims=True), 1e-9))
    lever = points[:, 3:] - points[:, :3]
    jacobian = np.stack([-lever[..., 1], lever[..., 0]], axis=1)  # (E, 2, 3)
    square = jacobian @ jacobian.transpose(0, 2, 1) + DAMPING**2 * np.eye(2)
    velocity = (jacobian.transpose(0, 2, 1) @ np.linalg.solve(square, wish[..., None]))[..., 0]
    velocity *= np.minimum(1, MAX_JOINT / np.abs(velocity).max(axis=1, keepdims=True).clip(1e-9))
    return velocity, (jacobian @ velocity[..., None])[..., 0]


def simulate(episodes, steps, rng):
    """States and actions of every episode at once: a dict of (E, T, ...) arrays."""
    turn, reach = rng.uniform(0.15, 0.85, episodes) * np.pi, rng.uniform(0.45, 0.92, episodes)
    target = BASE + reach[:, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    angles = np.stack([rng.uniform(0.25, 0.75, episodes) * np.pi, *rng.uniform(-1.6, 1.6, (2, episodes))], axis=1)
    gripper = np.ones(episodes)
    drift = np.zeros((episodes, 3))
    log = {"points": [], "proprio": [], "action": [], "reward": []}
    for _ in range(steps):
        points, heading = joints(angles)
        velocity, tip = expert(points, target)
        close = np.where(np.linalg.norm(target - points[:, 3], axis=1) < NEAR, 1.0, -1.0)
        tip_angle = (heading[:, 2] + np.pi) % (2 * np.pi) - np.pi
        log["points"].append(points)
        log["proprio"].append(np.column_stack([angles, points[:, 3], tip_angle, gripper]))
        log["action"].append(
            np.column_stack([velocity / MAX_JOINT, tip / MAX_TIP, velocity.sum(axis=1) / MAX_TURN, close])
        )
        log["reward"].append((close > 0) & (gripper < 0.1))
        drift = 0.8 * drift + rng.normal(0, 0.12, drift.shape)
        angles = angles + STEP_S * (velocity + drift)
        gripper = (gripper - 0.25 * close).clip(0, 1)
    return {"target": target} | {key: np.stack(rows, axis=1) for key, rows in log.items()}


class Canvas:
    """Frames (T, size, size, 3) of one episode; shapes are painted on all at once, with soft edges."""

    def __init__(self, frames, size, background):
        pixel = (np.arange(size, dtype=np.float32) + 0.5) * (2 * VIEW / size) - VIEW
        self.x, self.y = pixel[None, None, :], -pixel[None, :, None]
        self.metres = np.float32(2 * VIEW / size)
        shade = np.linspace(1.0, 0.86, size, dtype=np.float32)[None, :, None, None]
        self.rgb = np.broadcast_to(shade * np.float32(background), (frames, size, size, 3)).copy()

    def segment(self, start, end, start_radius, end_radius, colour):
        """A tapered link with round ends between points (T, 2), radii in metres; a disc where both are one."""
        (ax, ay), (dx, dy) = (np.float32(v).T[:, :, None, None] for v in (start, end - start))
        px, py = self.x - ax, self.y - ay
        along = ((px * dx + py * dy) / np.maximum(dx * dx + dy * dy, 1e-9)).clip(0, 1)
        px, py = px - along * dx, py - along * dy
        cover = (start_radius + (end_radius - start_radius) * along - np.sqrt(px * px + py * py)) / self.metres + 0.5
        seen = cover > 0
        under = self.rgb[seen]  # a link covers a few pixels of a hundred: only those are blended
        self.rgb[seen] = under + cover[seen].clip(0, 1)[:, None] * (np.float32(colour) - under)

    def disc(self, centre, radius, colour):
        """A filled circle at points (T, 2)."""
        self.segment(centre, centre, radius, radius, colour)


def render(points, heading, gripper, target, colour, size, tone):
    """One episode's frames (T, size, size, 3) uint8, of joint positions (T, 4, 2) and one target (2,)."""
    frames = len(points)
    canvas = Canvas(frames, size, tone)
    still = np.broadcast_to
    floor = [still(np.array([x, BASE[1] - 0.3]), (frames, 2)) for x in (-1.3, 1.3)]
    canvas.segment(*floor, 0.2, 0.2, np.array(tone) * 0.62)
    disc = still(target, (frames, 2))
    canvas.disc(disc, 0.095, (250, 250, 248))
    canvas.disc(disc, 0.075, colour)
    for i, (wide, thin) in enumerate([(0.085, 0.065), (0.065, 0.05), (0.05, 0.035)]):
        a, b = points[:, i], points[:, i + 1]
        canvas.segment(a, b, wide + 0.016, thin + 0.016, (48, 50, 56))
        canvas.segment(a, b, wide, thin, (238, 148 - 14 * i, 40 + 10 * i))
    across = np.stack([-np.sin(heading), np.cos(heading)], axis=1)
    ahead = np.stack([np.cos(heading), np.sin(heading)], axis=1)
    for side in (-1, 1):
        root = points[:, 3] + side * across * (0.035 + 0.045 * gripper[:, None])
        canvas.segment(points[:, 3], root, 0.022, 0.022, (48, 50, 56))
        canvas.segment(root, root + 0.1 * ahead, 0.024, 0.018, (48, 50, 56))
    plinth = still(BASE, (frames, 2))
    canvas.segment(plinth - [0.0, 0.16], plinth, 0.15, 0.11, (84, 90, 100))
    for i, radius in enumerate((0.06, 0.045, 0.034)):
        canvas.disc(points[:, i], radius, (48, 50, 56))
        canvas.disc(points[:, i], radius * 0.5, (206, 210, 214))
    return np.rint(canvas.rgb).astype(np.uint8)


def write(path, episodes, steps, seed, size, report):
    """Write the recording whole, or not at all."""
    rng = np.random.default_rng(seed)
    run = simulate(episodes, steps, rng)
    names = list(COLOURS)
    colours = [names[i] for i in rng.integers(len(names), size=episodes)]
    tones = rng.uniform((168, 172, 176), (222, 220, 214), (episodes, 3))
    held_out = set(rng.permutation(episodes)[: episodes // 5].tolist())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with h5py.File(temporary, "w") as file:
            data = file.create_group("data")
            data.attrs["total"] = episodes * steps
            data.attrs["env_args"] = json.dumps({"env_name": "PlanarReach", "type": 2, "env_kwargs": {"size": size}})
            for i, colour in enumerate(colours):
                proprio = run["proprio"][i]
                heading = proprio[:, :3].sum(axis=1)
                demo = data.create_group(f"demo_{i}")
                demo.attrs["num_samples"] = steps
                demo.attrs["language"] = f"reach the {colour} disc and close the gripper"
                demo["obs/agentview_image"] = render(
                    run["points"][i], heading, proprio[:, 6], run["target"][i], COLOURS[colour], size, tones[i]
                )
                demo["obs/robot0_proprio"] = proprio.astype(np.float32)
                demo["actions"] = run["action"][i].astype(np.float32)
                demo["rewards"] = run["reward"][i].astype(np.float32)
                demo["dones"] = (np.arange(steps) == steps - 1).astype(np.int64)
                report(i + 1)
            for split, members in (("train", set(range(episodes)) - held_out), ("valid", held_out)):
                file[f"mask/{split}"] = np.array([f"demo_{i}" for i in sorted(members)], dtype="S")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def positive(text):
    """An argparse type: a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.hdf5")
    parser.add_argument("--episodes", type=positive, default=40)
    parser.add_argument("--steps", type=positive, default=60, help="per episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=positive, default=64, help="of a frame, pixels each way")
    args = parser.parse_args()

    def report(done):
        end = "\n" if done == args.episodes else "\r"
        if sys.stderr.isatty() or done == args.episodes:
            print(f"{done}/{args.episodes} episodes of {args.steps} steps", end=end, file=sys.stderr, flush=True)

    try:
        write(args.out, args.episodes, args.steps, args.seed, args.size, report)
    except OSError as error:
        sys.exit(f"{args.out}: cannot be written: {error}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
