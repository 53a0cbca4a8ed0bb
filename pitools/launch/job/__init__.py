"""Run one attempt of a run inside its Slurm job: begin the attempt, run its steps, record its end.

    python -m pitools.launch.job begin                  create the attempt's folder and print its path
    python -m pitools.launch.job step NAME -- srun …    run a step: forward signals, detect hangs, bound its shutdown
    python -m pitools.launch.job end CODE               record the end; print `retry`, or the script's exit code

Exit codes of pitools, for a rank, an attempt, or the script. The program's own codes are passed on unchanged. No code
below is 253 (Slurm: out of memory) or in 128 to 192 (signals):

    75  the job must not run: another job owns the run, or this submission was revoked
    90  the rendezvous of the ranks failed
    91  rank 0 is not on the first node of the rank order
    92  a staged dataset is missing on the node
    93  the hang watch ended stalled ranks
    94  the attempt did not start: no folder for it
    95  stopped cleanly at the time limit or at preemption, to resume from a checkpoint
    96  rank 0 found no free pair of ports in the site's network.ports
    97  a node failed the preflight
"""
