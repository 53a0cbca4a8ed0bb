"""A tiny GPT-2 by transformers.Trainer, which finds its ranks in the variables that pitools sets."""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()


class Progress(TrainerCallback):
    """Tell pitools how many steps are saved."""

    def on_save(self, arguments, state, control, **_):
        if state.is_world_process_zero:
            Path(os.environ["PIT_RUN_DIR"], "progress").write_text(str(state.global_step))


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = (torch.arange(32) + index) % 97
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir=os.environ["PIT_CHECKPOINT_DIR"],
    run_name=os.environ["PIT_RUN_ID"],
    max_steps=args.steps,
    per_device_train_batch_size=16,
    save_steps=10,
    save_total_limit=2,
    logging_steps=10,
    report_to=[],  # ["wandb"] or ["tensorboard"]
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=[Progress()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
