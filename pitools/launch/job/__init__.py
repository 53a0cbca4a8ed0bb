"""Begin one attempt inside the job, run its steps, and record how it ended.

    python -m pitools.launch.job begin                  make the attempt's folder and print its path
    python -m pitools.launch.job step NAME -- srun …    run a step: forward signals, detect hangs, bound its shutdown
    python -m pitools.launch.job end CODE               record the end; print `retry`, or the script's exit code

Exit codes of pitools, for a rank, an attempt, or the script. The program's own codes are passed on unchanged; none
below is 253 (Slurm's, for memory) or in 128 to 192 (signals):

    75  the job must not run: another job owns, or owned, the run
    90  the rendezvous of the ranks failed
    91  rank 0 is not on the first node of the rank order
    92  a dataset is not on the node
    93  the hang watch ended stalled ranks
    94  the attempt did not start: no folder for it, or no rank order
    95  stopped cleanly, to resume from a checkpoint: at the time limit, or at preemption
    96  rank 0 found no free pair of ports in the site's network.ports
"""
