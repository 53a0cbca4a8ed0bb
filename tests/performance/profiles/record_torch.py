"""One rank of a DDP job on gloo with a fault, profiled: `record_torch.py RANK PORT FAULT TRACE.json.gz`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

STEPS = 5


class Samples(Dataset[torch.Tensor]):
    """4 samples a batch. delay_s: of each batch's first sample."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return 4 * (STEPS + 3)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            time.sleep(self.delay_s)
        return torch.ones(128)


def main(rank: int, port: int, fault: str, trace: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    plain = torch.nn.Linear(128, 128, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(0.05 if fault == "slow-input" else 0.0), batch_size=4)
    burden = torch.ones(640, 640)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=2, active=STEPS, repeat=1),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(trace)),
    ) as prof:
        for batch in loader:
            for _ in range(16 if fault == "slow-rank" and rank == 1 else 4):
                burden @ burden
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "host-stall":
                time.sleep(0.05)
            prof.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
