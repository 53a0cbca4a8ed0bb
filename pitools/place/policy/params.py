"""The parameters of a decision."""

from __future__ import annotations

import msgspec


class PolicyParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the order of jobs, their placement, and the moves of tickets. None is a number of hours.

    Every job starts as soon as any pool has room, as in a federation, but for the freedoms of one queue over all pools:

    due_share: a job is due once its age, and the time until units for it are expected to be free, reach this share of
    the fair wait: the time that all pools together need for the pending jobs of its tier and above. Due jobs come first
    within their tier, in the order of submission; of the others the one with the least expected work comes first.
    patience: a job that could start leaves a pool for a faster one for at most this share of the run time that it would
    save there, and never longer than the oldest pending job, of its tier or above, has waited.
    last_unit: how many times its mean price the last free unit of a pool costs.
    limit_usage: expected used share of the rest of a running job's time limit.
    next_decision_s: time after which the next decision is expected.

    hysteresis, move_s, min_wait_before_move_s: a pending ticket older than min_wait_before_move_s is withdrawn if
    another pool can start the job now and end it earlier by more than hysteresis x move_s, the cost of a move.
    """

    due_share: float = 0.8
    patience: float = 0.3
    last_unit: float = 2.0
    limit_usage: float = 0.3
    next_decision_s: float = 60.0
    hysteresis: float = 2.0
    move_s: float = 300.0
    min_wait_before_move_s: float = 600.0
