"""Behaviour cloning in PyTorch, data-parallel over processes. Copy this file as your start.

    PIT_DATA_DEMO=<root>/<name>/<version> python -m pitools.train.torch_bc

One process drives one device. Every rank computes the gradients of its share of the global batch, one all-reduce sums
them, and every rank makes the same update. DistributedDataParallel would hide the all-reduce inside the backward pass:
faster for a large model, but its time could not be told from the computation's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pitools.run.steps import StepLog, Stopwatch
from pitools.train import checkpoint
from pitools.train import rank as ranks
from pitools.train.batches import Batch, Demonstrations, global_batch, share
from pitools.train.join import Agree, join_torch
from pitools.train.rank import Rank
from pitools.train.stop import SIGNALS, StopRequest, agreed

MOMENTUM = 0.9
CONVOLUTIONS = ((8, 4, 16), (4, 2, 32), (3, 2, 32))  # (kernel, stride, channels)
HIDDEN = 128


class Policy(nn.Module):  # type: ignore[misc]  # torch's classes are untyped to mypy
    """Normalised actions (b, A) of frames and proprioception: a convolutional net a camera, and two dense layers.

    GELU and not ReLU: at ReLU's corner a rounding error decides which slope counts, and within a hundred steps the loss
    would depend on how many ranks made the sum.
    """

    def __init__(self, example: Batch) -> None:
        super().__init__()
        self.cameras = nn.ModuleList()
        features = example.proprio.shape[1]
        for images in example.images.values():
            layers: list[nn.Module] = []
            channels = images.shape[-1]
            for kernel, stride, out in CONVOLUTIONS:
                layers += [nn.Conv2d(channels, out, kernel, stride, padding=(kernel - 1) // 2), nn.GELU()]
                channels = out
            self.cameras.append(nn.Sequential(*layers, nn.Flatten()))
            features += self.cameras[-1](frames(torch.from_numpy(images))).shape[1]
        actions = example.action.shape[1]
        self.head = nn.Sequential(nn.Linear(features, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, actions))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.kaiming_normal_(parameter)

    def forward(self, images: list[Any], proprio: Any) -> Any:
        """images: (b, H, W, C) uint8 a camera. proprio: (b, P)."""
        features = [net(frames(image)) for net, image in zip(self.cameras, images, strict=True)]
        return self.head(torch.cat([proprio, *features], dim=1))


def frames(images: Any) -> Any:
    """(b, H, W, C) uint8 → (b, C, H, W) float in [-0.5, 0.5]."""
    return images.permute(0, 3, 1, 2).float() / 255.0 - 0.5


class Inputs(NamedTuple):
    """A batch on the rank's device. images: (b, H, W, C) uint8 a camera."""

    images: list[Any]
    proprio: Any
    action: Any


def move(batch: Batch, device: Any) -> Inputs:
    """The batch on a device."""
    arrays = [*batch.images.values(), batch.proprio, batch.action]
    *images, proprio, action = (torch.from_numpy(array).to(device) for array in arrays)
    return Inputs(images, proprio, settled(action))


def compute(policy: Policy, inputs: Inputs, batch_size: int, votes: list[float]) -> Any:
    """This rank's part of all that is summed over ranks, in one vector: one message a step."""
    error = policy(inputs.images, inputs.proprio) - inputs.action
    loss = error.square().mean(dim=1).sum() / batch_size
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    head = [loss.detach()[None], torch.tensor(votes, device=loss.device)]
    return torch.cat([*head, *(gradient.flatten() for gradient in gradients)])


def update(policy: Policy, momentum: dict[str, Any], vector: Any, learning_rate: float) -> None:
    """One step of SGD with momentum, in place; vector: the summed gradients.

    What `torch.optim.SGD` does, without the 2 s of imports that it costs each rank.
    """
    parameters = dict(policy.named_parameters())
    parts = vector.split([parameter.numel() for parameter in parameters.values()])
    with torch.no_grad():
        for (name, parameter), gradient in zip(parameters.items(), parts, strict=True):
            momentum[name].mul_(MOMENTUM).add_(gradient.view_as(parameter))
            parameter.sub_(momentum[name], alpha=learning_rate)


def main(*, steps: int = 200, batch_size: int = 64, learning_rate: float = 0.02, seed: int = 0,
         checkpoint_every: int = 0, dataset: str = "demo") -> None:  # fmt: skip
    """Train until `steps` steps are made in all, going on from the newest checkpoint.

    batch_size: over all ranks. checkpoint_every: in steps; 0 for only at the end. Raises SystemExit(128 + signal)
    after the checkpoint that SIGTERM or SIGUSR2 asked for.
    """
    rank = ranks.from_environment()
    if threads := ranks.threads():
        torch.set_num_threads(threads)
    # In TF32, or with an algorithm chosen by its speed, the sum would depend on how the batch is cut.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    data = Demonstrations(ranks.dataset_path(dataset))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank.local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    with join_torch(rank, "nccl" if gpus else "gloo") as agree:
        stopped = train(rank, agree, data, device, steps, batch_size, learning_rate, seed, checkpoint_every)
    if stopped:
        raise SystemExit(128 + stopped)


def train(rank: Rank, agree: Agree, data: Demonstrations, device: Any, steps: int, batch_size: int,
          learning_rate: float, seed: int, checkpoint_every: int) -> int:  # fmt: skip
    """The loop. Returns the signal it stopped for, or 0."""
    torch.manual_seed(seed)
    policy = Policy(data.batch(np.zeros(1, np.int64))).to(device)
    momentum = {name: torch.zeros_like(parameter) for name, parameter in policy.named_parameters()}
    state = as_state(policy, momentum)
    # Rank 0 says which checkpoint: on a shared file system the newest is not the newest everywhere at once.
    found = agree("resume", checkpoint.newest(rank.checkpoint_dir))
    if rank.checkpoint_dir and found:
        for name, array in checkpoint.load(rank.checkpoint_dir / found, state).items():
            state[name].copy_(torch.from_numpy(array))
    log = StepLog(rank.attempt_dir / "steps", rank.rank) if rank.attempt_dir else None
    stopped = 0
    with StopRequest() as stop:
        for step in range(checkpoint.steps(found), steps):
            began, watch = time.perf_counter(), Stopwatch()
            numbers = share(global_batch(seed, step, batch_size, len(data.indices)), rank.rank, rank.world_size)
            batch = data.batch(numbers)
            on_device = move(batch, device)
            input_s = watch.lap()
            vector = settled(compute(policy, on_device, batch_size, stop.votes()))
            compute_s = watch.lap()
            if rank.world_size > 1:
                dist.all_reduce(vector)
            loss, *votes = vector[: 1 + len(SIGNALS)].tolist()  # waits for the device
            comm_s = watch.lap()
            update(policy, momentum, vector[1 + len(SIGNALS) :], learning_rate)
            settled(vector)
            compute_s += watch.lap()
            stopped = agreed(votes)
            if rank.rank == 0 and rank.checkpoint_dir and checkpoint.due(step + 1, steps, checkpoint_every, stopped):
                checkpoint.save(rank.checkpoint_dir, step + 1, {name: tensor.cpu() for name, tensor in state.items()})
            wall_s = time.perf_counter() - began
            if log:
                log.write(step=step, loss=loss, wall_s=wall_s, input_s=input_s, compute_s=compute_s, comm_s=comm_s,
                          samples=len(numbers), bytes_read=batch.nbytes)  # fmt: skip
            if rank.rank == 0 and (step % 10 == 0 or step + 1 == steps or stopped):
                print(f"step {step} loss {loss:.6f} {1e3 * wall_s:.0f} ms", flush=True)
            if stopped:
                break
    if log:
        log.close()
    return stopped


def as_state(policy: Policy, momentum: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds, by name: the tensors themselves, not copies."""
    named = {f"params/{name}": parameter.detach() for name, parameter in policy.named_parameters()}
    return named | {f"momentum/{name}": tensor for name, tensor in momentum.items()}


def settled(tensor: Any) -> Any:
    """The tensor, once its device has done all that was asked of it: else a lap would time the asking."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor


if __name__ == "__main__":
    main()
