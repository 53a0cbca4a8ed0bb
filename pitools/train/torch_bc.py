"""Behaviour cloning in PyTorch, data-parallel over processes. Copy this file as your start.

    PIT_DATA_DEMO=<root>/<name>/<version> python -m pitools.train.torch_bc

One process drives one device. Every rank computes the gradients of its share of the global batch, one all-reduce sums
them, and every rank makes the same update. DistributedDataParallel would hide the all-reduce inside the backward pass:
faster for a large model, but its time could not be separated from the computation's.
"""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pitools.loader.loader import Loader
from pitools.loader.torch import torch_batches
from pitools.run.steps import StepLog, Stopwatch
from pitools.train import rank as ranks
from pitools.train.checkpointing import make_checkpointer, should_save
from pitools.train.dataset import DemonstrationDataset
from pitools.train.distributed import RankGroup, join_torch, require_same_order
from pitools.train.preemption import SIGNALS, StopSignal, combine_votes
from pitools.train.rank import RankEnv

MOMENTUM = 0.9
CONVOLUTIONS = ((8, 4, 16), (4, 2, 32), (3, 2, 32))  # (kernel, stride, channels)
HIDDEN = 128


class Policy(nn.Module):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """Normalised actions (b, A) of frames and proprioception: a convolutional net a camera, and two dense layers.

    GELU and not ReLU: near 0 a rounding error selects ReLU's branch, and within a hundred steps the loss
    would depend on how many ranks made the sum.
    """

    def __init__(self, data: DemonstrationDataset) -> None:
        super().__init__()
        self.names, self.cameras = data.cameras, nn.ModuleList()
        (features,), (actions,) = data.fields["proprio"].shape, data.fields["action"].shape
        for camera in data.cameras:
            layers: list[nn.Module] = []
            height, width, channels = data.fields[camera].shape
            for kernel, stride, out in CONVOLUTIONS:
                layers += [nn.Conv2d(channels, out, kernel, stride, padding=(kernel - 1) // 2), nn.GELU()]
                height, width = ((side + 2 * ((kernel - 1) // 2) - kernel) // stride + 1 for side in (height, width))
                channels = out
            self.cameras.append(nn.Sequential(*layers, nn.Flatten()))
            features += height * width * channels
        self.head = nn.Sequential(nn.Linear(features, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, actions))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.kaiming_normal_(parameter)

    def forward(self, inputs: dict[str, Any]) -> Any:
        """inputs: (b, H, W, C) uint8 of each camera, and proprio (b, P)."""
        features = [net(frames(inputs[name])) for name, net in zip(self.names, self.cameras, strict=True)]
        return self.head(torch.cat([inputs["proprio"], *features], dim=1))


def frames(images: Any) -> Any:
    """(b, H, W, C) uint8 → (b, C, H, W) float in [-0.5, 0.5]."""
    return images.permute(0, 3, 1, 2).float() / 255.0 - 0.5


def compute(policy: Policy, inputs: dict[str, Any], global_batch_size: int, votes: list[float]) -> Any:
    """This rank's part of all that is summed over ranks, in one vector: one message a step."""
    error = policy(inputs) - inputs["action"]
    loss = error.square().mean(dim=1).sum() / global_batch_size
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    head = [loss.detach()[None], torch.tensor(votes, device=loss.device)]
    return torch.cat([*head, *(gradient.flatten() for gradient in gradients)])


def update(policy: Policy, momentum: dict[str, Any], vector: Any, learning_rate: float) -> None:
    """One step of SGD with momentum, in place; vector: the summed gradients.

    As `torch.optim.SGD`, whose import costs each rank 2 s.
    """
    parameters = dict(policy.named_parameters())
    parts = vector.split([parameter.numel() for parameter in parameters.values()])
    with torch.no_grad():
        for (name, parameter), gradient in zip(parameters.items(), parts, strict=True):
            momentum[name].mul_(MOMENTUM).add_(gradient.view_as(parameter))
            parameter.sub_(momentum[name], alpha=learning_rate)


def main(
    *,
    steps: int = 200,
    global_batch_size: int = 64,
    learning_rate: float = 0.02,
    seed: int = 0,
    checkpoint_every: int = 0,
    dataset: str = "demo",
) -> None:
    """Train up to step `steps`, from the newest checkpoint if there is one.

    global_batch_size: over all ranks. checkpoint_every: in steps; 0: only at the end. Raises SystemExit(128 + signal)
    after the checkpoint that SIGTERM or SIGUSR2 caused.
    """
    rank = ranks.read_rank_env()
    if threads := ranks.cpu_threads():
        torch.set_num_threads(threads)
    # In TF32, or with an algorithm chosen by its speed, the sum would depend on how the batch is cut.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    data = DemonstrationDataset(ranks.dataset_path(dataset), seed=seed)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank.local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    with join_torch(rank, "nccl" if gpus else "gloo") as group:
        stopped = train(rank, group, data, device, steps, global_batch_size, learning_rate, seed, checkpoint_every)
    if stopped:
        raise SystemExit(128 + stopped)


def train(
    rank: RankEnv,
    group: RankGroup,
    data: DemonstrationDataset,
    device: Any,
    steps: int,
    global_batch_size: int,
    learning_rate: float,
    seed: int,
    checkpoint_every: int,
) -> int:
    """The loop. Returns the signal it stopped for, or 0."""
    torch.manual_seed(seed)
    policy = Policy(data).to(device)
    momentum = {name: torch.zeros_like(parameter) for name, parameter in policy.named_parameters()}
    state = as_state(policy, momentum)
    loader = Loader(data, global_batch_size=global_batch_size, rank=rank.rank, world_size=rank.world_size)
    batches = torch_batches(loader, device)
    require_same_order(group.broadcast, batches.state())
    checkpointer = make_checkpointer(rank, group, "torch")
    done = 0
    if checkpointer and (restored := checkpointer.restore(state)):
        done = restored.step
        batches.load_state_dict(restored.loader_state)
    log = StepLog(rank.attempt_dir / "steps", rank.rank) if rank.attempt_dir else None
    stopped = 0
    with StopSignal() as stop, closing(batches), checkpointer or nullcontext():
        for step in range(done, steps):
            if checkpointer:
                checkpointer.poll()
            began, watch = time.perf_counter(), Stopwatch()
            batch = next(batches)
            input_s = watch.lap()
            vector = synchronized(compute(policy, batch.arrays, global_batch_size, stop.votes()))
            compute_s = watch.lap()
            if rank.world_size > 1:
                dist.all_reduce(vector)
            loss, *votes = vector[: 1 + len(SIGNALS)].tolist()  # waits for the device
            comm_s = watch.lap()
            update(policy, momentum, vector[1 + len(SIGNALS) :], learning_rate)
            synchronized(vector)
            compute_s += watch.lap()
            stopped, checkpoint_s = combine_votes(votes), 0.0
            if checkpointer and should_save(step + 1, steps, checkpoint_every, stopped):
                if log:
                    log.heartbeat()  # a save waits for the one before
                checkpointer.save(step + 1, state, batches.state())
                checkpoint_s = watch.lap()
            wall_s = time.perf_counter() - began
            if log:
                log.write(
                    step=step,
                    loss=loss,
                    wall_s=wall_s,
                    input_s=input_s,
                    compute_s=compute_s,
                    comm_s=comm_s,
                    rank_samples=len(batch.sample_indices),
                    bytes_read=batch.bytes_read,
                    checkpoint_s=checkpoint_s,
                )
            if rank.rank == 0 and (step % 10 == 0 or step + 1 == steps or stopped):
                print(f"step {step} loss {loss:.6f} {1e3 * wall_s:.0f} ms", flush=True)
            if stopped:
                break
        if log:
            log.close()  # before the last save is waited for: the hang watch allows it more time than a step
    return stopped


def as_state(policy: Policy, momentum: dict[str, Any]) -> dict[str, Any]:
    """Return the training state that a checkpoint contains, by name: the tensors themselves, not copies."""
    named = {f"params/{name}": parameter.detach() for name, parameter in policy.named_parameters()}
    return named | {f"momentum/{name}": tensor for name, tensor in momentum.items()}


def synchronized(tensor: Any) -> Any:
    """Return a tensor after its device has finished all queued work: otherwise a lap would time the launch only."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor


if __name__ == "__main__":
    main()
