"""The Echo Trap monitor: is this run about to collapse?

RAGEN (arXiv 2504.20073, section 4.1) finds that the rewards of a group become alike, replies and thoughts become one
template, entropy goes and gradients spike before success falls. Each of these is compared here with the run's own first
iterations. A run that gets better may do all of this, too: where success nears 1, rewards become alike because they are
all good. So nothing fires while success is above its start. results/README.md says how often that is right.

    from results.monitor import echo_trap
    echo_trap(rows)     # rows: the dicts of metrics.jsonl so far
"""
import math

START, PATIENCE = 5, 5          # iterations that are the start; iterations in a row out of range before it is said
WATCH = {                       # metric: (its name in words, least and most it may be, as a share of its start)
    "reward_std_in_group": ("reward std", 0.7, math.inf),
    "entropy": ("entropy", 0.4, 2),
    "grad_norm_max": ("gradient norm", 0, 10),
    "valid_frac": ("valid replies", 0.9, math.inf),
    "distinct_reply_frac": ("distinct replies", 0.7, math.inf),
    "repeated_thought_frac": ("repeated thoughts", 0, 3),
}
ALWAYS = "valid_frac", "grad_norm_max"      # out of range these are no sign of doing well, whatever the success


def healthy_rows(rows: list[dict]) -> list[dict]:
    """The iterations that the weights at hand have gone through: without what a rollback took back."""
    kept = []
    for row in rows:
        kept.append(row)
        if "rolled_back_to" in row:
            kept = [past for past in kept if past["iter"] <= row["rolled_back_to"]]
    return kept


def outside(rows: list[dict], key: str) -> tuple[list[bool], float]:
    """Whether a metric was out of its range, for each iteration behind the start that has it; its last share of the
    start."""
    _, least, most = WATCH[key]
    values = [row[key] for row in rows if row.get(key) is not None]
    start = max(sum(values[:START]) / START, 1e-9)
    return [not least <= value / start <= most for value in values[START:]], values[-1] / start if values else 1.0


def echo_trap(rows: list[dict]) -> tuple[str, bool]:
    """rows: the lines of metrics.jsonl so far -> (the alarm, "" if there is none; whether the run is in health: valid
    replies and gradient norm in their range right now, and success not below its start or all the others in theirs, too).
    After a rollback patience begins anew.

    >>> calm, trap = {"success": 0.3, "entropy": 0.5}, {"success": 0.2, "entropy": 0.1}
    >>> echo_trap([calm] * 5 + [trap] * 6)
    ('entropy 20 % of its start for 6 iterations', False)
    """
    fresh = [*("rolled_back_to" in row for row in rows[::-1]), True].index(True)        # iterations since a rollback
    rows, alarms, healthy = healthy_rows(rows), [], True
    success = [row["success"] for row in rows]
    low = sum(success[-PATIENCE:]) / PATIENCE < sum(success[:START]) / START
    for key, (words, *_) in WATCH.items():
        out, share = outside(rows, key)
        count = ([False] + out)[::-1].index(False)                  # iterations in a row, up to the last
        count *= bool(rows) and rows[-1].get(key) is not None       # which says nothing when it lacks the metric
        healthy &= not count or not (low or key in ALWAYS)
        if low and min(count, fresh) >= PATIENCE:
            alarms.append(f"{words} {100 * share:.0f} % of its start for {count} iterations")
    return ", ".join(alarms), healthy
