"""LeRobot's ACT under DistributedDataParallel: an image and the joints in, a chunk of actions out."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from torch.nn.parallel import DistributedDataParallel

import pitools
from pitools.run.steps import StepLog

CHUNK = 8
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
config = ACTConfig(
    input_features={
        "observation.state": PolicyFeature(FeatureType.STATE, (7,)),
        "observation.image": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
    },
    output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
    chunk_size=CHUNK,
    n_action_steps=CHUNK,
    dim_model=32,  # leave these four out for ACT's own size
    n_heads=2,
    dim_feedforward=64,
    n_encoder_layers=1,
    pretrained_backbone_weights=None,
    device="cpu",
)
policy = DistributedDataParallel(ACTPolicy(config), find_unused_parameters=True)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-4)
batches = pitools.load(
    os.environ["PIT_DATA_DEMO"],
    windows={"obs/robot0_proprio": (0, 1), "obs/agentview_image": (0, 1), "action": (0, CHUNK)},
    batch_size=8,
    framework="torch",
)
checkpoint, first = Path(os.environ["PIT_CHECKPOINT_DIR"], "act.pt"), 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    batches.load_state_dict(saved["batches"])
    first = saved["step"]

log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"], "steps"), dist.get_rank())
for step in range(first, args.steps):
    began = time.perf_counter()
    batch = next(batches)
    loss, _ = policy(
        {
            "observation.state": batch.arrays["obs/robot0_proprio"][:, 0],
            "observation.image": batch.arrays["obs/agentview_image"][:, 0].permute(0, 3, 1, 2) / 255,
            "action": batch.arrays["action"],
            "action_is_pad": ~batch.valid_mask["action"],
        }
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    wall = time.perf_counter() - began
    log.write(
        step=step,
        loss=loss.item(),
        wall_s=wall,
        input_s=0,
        compute_s=wall,
        comm_s=0,
        rank_samples=8 // dist.get_world_size(),
    )
    if (step + 1) % 5 == 0 and dist.get_rank() == 0:
        part = checkpoint.with_suffix(".part")
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
        torch.save({**state, "step": step + 1}, part)
        part.rename(checkpoint)
        Path(os.environ["PIT_RUN_DIR"], "progress").write_text(str(step + 1))
log.close()
dist.destroy_process_group()
