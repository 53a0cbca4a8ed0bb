"""What runs inside the job, around one attempt: begin, attend, end.

    python -m pitools.launch.job begin                   make the attempt's folder; its path is the one line printed
    python -m pitools.launch.job attend [NAME] -- srun … run a step, heard and watched, to an end that is bounded
    python -m pitools.launch.job end CODE                say how it ended; prints `retry`, or the script's exit code

Exit codes of ours, of a rank, an attempt, or the script; the program's own codes are passed on as they are, and none
of ours is 253 (Slurm's, for memory) or of 128 to 192 (signals):

    75  the job has no leave to run: the run goes on, or went on, elsewhere
    90  the ranks did not meet
    91  rank 0 is not where the rank order says
    92  a dataset is not on the node
    93  the watch ended ranks that stood still
    94  the attempt did not begin: no folder for it, or no rank order
    95  stopped in good order, to go on from its checkpoint: at the time limit, or at preemption
    96  rank 0 found no free pair of ports in the site's network.ports
"""
