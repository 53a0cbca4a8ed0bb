"""Behaviour cloning by Lightning: pitools starts the ranks, stages the data and continues the run after a fault."""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

import pitools

SAVE_EVERY = 10


class Clone(lightning.LightningModule):
    """Actions from joint angles."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(7, 64), torch.nn.ReLU(), torch.nn.Linear(64, 7))

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(
            self.net(batch.arrays["obs/robot0_proprio"][:, 0]), batch.arrays["action"][:, 0]
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Progress(Callback):
    """Tell pitools how many steps are saved: a retry after progress costs none of the run's retries."""

    def on_train_batch_start(self, trainer, module, batch, number):
        if trainer.is_global_zero and trainer.global_step and trainer.global_step % SAVE_EVERY == 0:  # it is on disk
            Path(os.environ["PIT_RUN_DIR"], "progress").write_text(str(trainer.global_step))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
folder = Path(os.environ["PIT_CHECKPOINT_DIR"])
windows = {"obs/robot0_proprio": (0, 1), "action": (0, 1)}
batches = pitools.load(os.environ["PIT_DATA_DEMO"], windows=windows, batch_size=64, framework="torch", workers=1)
trainer = lightning.Trainer(
    max_steps=args.steps,
    accelerator="cpu",  # "gpu" on a GPU cluster
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    plugins=[TorchElasticEnvironment()],  # the ranks are there already, and have torchrun's variables
    callbacks=[
        ModelCheckpoint(folder, save_last=True, every_n_train_steps=SAVE_EVERY, save_top_k=1, monitor=None),
        Progress(),
    ],
    logger=TensorBoardLogger(os.environ["PIT_RUN_DIR"], name="tensorboard", version=""),
    log_every_n_steps=5,
    enable_progress_bar=False,
    use_distributed_sampler=False,  # pitools.load gives each rank its share
)
last = folder / "last.ckpt"
trainer.fit(Clone(), batches, ckpt_path=last if last.exists() else None)
