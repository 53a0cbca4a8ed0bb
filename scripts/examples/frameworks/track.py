"""Log to W&B and TensorBoard; the first attempt fails at step 5, and the second continues both logs."""

import os
from pathlib import Path

import wandb
from torch.utils.tensorboard import SummaryWriter

run_dir, progress = Path(os.environ["PIT_RUN_DIR"]), Path(os.environ["PIT_RUN_DIR"], "progress")
first = int(progress.read_text()) if progress.exists() else 0
tracked = wandb.init(
    id=os.environ["PIT_RUN_ID"],  # the same for each attempt
    resume="allow",
    project="reach",
    config={"lr": float(os.environ["PIT_PARAM_LR"]), "attempt": int(os.environ["PIT_ATTEMPT"])},
    dir=run_dir,
)
writer = SummaryWriter(run_dir / "tensorboard", purge_step=first)  # steps that are done again replace the old ones
for step in range(first, 10):
    tracked.log({"loss": 1 / (step + 1)}, step=step)
    writer.add_scalar("loss", 1 / (step + 1), step)
    if step % 2 == 1:
        progress.write_text(str(step + 1))
    if step == 5 and os.environ["PIT_ATTEMPT"] == "0":
        raise RuntimeError("a fault, for this example")
writer.close()
tracked.finish()
