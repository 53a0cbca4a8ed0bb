"""The output of squeue and scontrol, as the exporter asks for it."""

from __future__ import annotations

SEP = "|0123456789ab|"
CLOCK_S = 1_795_735_200  # 2026-11-26T23:20:00Z


def job_text(sep: str = SEP, **changes: str) -> str:
    """A row of squeue, of a running job of two nodes, with these columns changed."""
    columns = {
        "JobArrayID": "7",
        "State": "RUNNING",
        "Partition": "gpu",
        "QOS": "normal",
        "NumNodes": "2",
        "NodeList": "n[01-02]",
        "EligibleTime": "2026-11-26T23:00:00",
        "SubmitTime": "2026-11-26T22:50:00",
        "StartTime": "2026-11-26T23:10:00",
        "EndTime": "2026-11-27T23:10:00",
        "tres-alloc": "cpu=8,mem=1G,node=2,billing=8,gres/gpu=8",
        "tres-per-node": "gres:gpu:4",
        "Reason": "None",
        "JobID": "7",
    }
    assert changes.keys() <= columns.keys()
    return "".join(f"{cell}{sep}" for cell in (columns | changes).values()) + "\n"


def node_text(
    name: str, state: str = "IDLE", gpus: int = 4, used: int = 0, partitions: str = "gpu", tail: str = ""
) -> str:
    """A line of `scontrol -d -o show node`."""
    gres = f"Gres=gpu:{gpus} GresDrain=N/A GresUsed=gpu:{used}(IDX:N/A)"
    return (
        f"NodeName={name} CPUAlloc=0 CPUTot=8 {gres} NodeAddr={name} "
        f"RealMemory=1000 State={state} Partitions={partitions} CfgTRES=cpu=8 AllocTRES={tail}\n"
    )
