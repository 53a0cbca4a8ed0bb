"""pitools: a Slurm-centric HPC toolkit of composable commands for robot-model training."""

__version__ = "0.1.0"
