"""Curves of a run, and the figures and tables of results/README.md.

    python results/plot.py runs/NAME    # runs/NAME/curves.png (needs matplotlib)
    python results/plot.py              # all figures (results/*.png) and all tables (in results/README.md), from the
                                        # runs in results/echo that results/run.sh made
"""
import json
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PANELS = {"success": "success", "reward_std_in_group": "reward std in group", "entropy": "entropy (nats a token)",
          "grad_norm_max": "largest gradient norm"}
WINDOW = 10             # iterations of the mean that "success" is judged by
SMOOTH = 0.8            # weight of the past in the drawn moving average; the raw curve lies beneath
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}     # Student's t: 95 % interval of a mean over so many seeds


def read_rows(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pyplot_or_none():
    """matplotlib's pyplot, drawing to files; None, and one line, where it is not installed."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        return pyplot
    except ImportError:
        print("no figures: matplotlib is not installed (pip install matplotlib)")


# ------------------------------------------------------------------------------------------------ one run

def draw_run(folder: Path) -> None:
    """curves.png in a run folder: success, in-group reward std, entropy, gradient norm."""
    pyplot = pyplot_or_none()
    if pyplot is None:
        return
    rows, summary = read_rows(folder), json.loads((folder / "summary.json").read_text())
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items()):
        points = [(row["iter"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axis.plot(*zip(*points), color="tab:blue", linewidth=1, label="training rollouts")
        axis.set(title=title, xlabel="iteration")
    held_out = [(row["iter"], row["eval_success"]) for row in rows if row.get("eval_success") is not None]
    held_out = [(0, summary["success_before"]), *held_out, (summary["iters"], summary["success_after"])]
    axes[0].plot(*zip(*held_out), "o-", color="tab:orange", markersize=4, label="held-out levels")
    for key, style in (("success_random", ":"), ("success_optimal", "--")):
        if summary.get(key) is not None:
            axes[0].axhline(summary[key], color="gray", linestyle=style, label=key.removeprefix("success_"))
    axes[0].set_ylim(0, 1.05)
    axes[0].legend(fontsize=8)
    for axis in axes[1:]:
        axis.set_ylim(bottom=0)
    figure.savefig(folder / "curves.png", dpi=120)
    pyplot.close(figure)


# --------------------------------------------------------------------------------------------- many seeds

def trailing_means(success: list[float]) -> list[float]:
    """Means over WINDOW iterations, one for each iteration from the WINDOW-th on."""
    return [sum(success[i:i + WINDOW]) / WINDOW for i in range(len(success) - WINDOW + 1)]


def collapse_iteration(success: list[float]) -> int | None:
    """The iteration (from 1) at which a run collapses, or None. Fixed before any run was looked at: the 10-iteration
    mean of training success falls below half of its own peak and below its start, and stays there to the end.

    >>> collapse_iteration([0.4] * 10 + [0.8] * 10 + [0.0] * 20)
    28
    >>> collapse_iteration([0.4] * 20 + [0.0] * 20 + [0.4] * 10)       # it recovers
    """
    means, found = trailing_means(success), None
    for i, mean in enumerate(means):
        down = mean < max(means[:i + 1]) / 2 and mean < means[0]
        found = (found or i + WINDOW) if down else None
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean over seeds, and half of its 95 % interval (Student's t; nan for one seed)."""
    mean, n = sum(values) / len(values), len(values)
    return mean, T95.get(n, math.nan) * math.sqrt(sum((x - mean) ** 2 for x in values) / max(1, n - 1) / n)


def runs_of(name: str) -> list[Path]:
    """The finished runs of an experiment, by seed."""
    return [path.parent for path in sorted(HERE.glob(f"echo/{name}-seed*/summary.json"))]


def row_of(name: str) -> dict | None:
    """What is said of an experiment: numbers over its seeds. None if no run of it is there."""
    folders = runs_of(name)
    if not folders:
        return None
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    successes = [[row["success"] for row in read_rows(folder)] for folder in folders]
    means = [trailing_means(success) for success in successes]
    return {"seeds": len(folders), "after": interval([s["success_after"] for s in summaries]),
            "before": interval([s["success_before"] for s in summaries]),
            "random": interval([s["success_random"] for s in summaries]),
            "optimal": interval([s["success_optimal"] for s in summaries]),
            "each": [s["success_after"] for s in summaries], "peak": interval([max(m) for m in means]),
            "end": interval([m[-1] for m in means]), "collapsed": [collapse_iteration(s) for s in successes],
            "steps": sum(row["optimizer_steps"] for row in read_rows(folders[0])) / len(successes[0]),
            "minutes": sum(s["seconds"] for s in summaries) / 60 / len(folders)}


def percent(pair: tuple[float, float]) -> str:
    """(0.5, 0.1) -> 50.0 +- 10.0."""
    return f"{100 * pair[0]:.1f}" + ("" if math.isnan(pair[1]) else f" +- {100 * pair[1]:.1f}")


def table(names: list[str]) -> str:
    """Markdown: an experiment a line. Success in percent; +- is a 95 % interval over seeds."""
    lines = ["| experiment | seeds | steps an iteration | peak, training | end, training | held out, after | each seed "
             "| collapsed, at iteration | minutes a run |", "|" + "---|" * 9]
    for name in names:
        row = row_of(name)
        if row is None:
            lines.append(f"| {name} | not run |" + " |" * 7)
            continue
        fallen = [str(at) for at in row["collapsed"] if at]
        lines.append(
            f"| {name} | {row['seeds']} | {row['steps']:.1f} | {percent(row['peak'])} | {percent(row['end'])} "
            f"| {percent(row['after'])} | {', '.join(f'{100 * x:.1f}' for x in row['each'])} "
            f"| {len(fallen)} of {row['seeds']}{' (' + ', '.join(fallen) + ')' if fallen else ''} "
            f"| {row['minutes']:.1f} |")
    row = next((row for row in map(row_of, names) if row), None)
    if row:
        lines.append(f"\nHeld-out success of random play {percent(row['random'][:1] + (math.nan,))}, of the start "
                     f"{percent(row['before'][:1] + (math.nan,))}, of the optimum "
                     f"{percent(row['optimal'][:1] + (math.nan,))}.")
    return "\n".join(lines)


def draw_seeds(axis, name: str, key: str, label: str, color: str) -> None:
    """Mean over seeds of a metric, smoothed, with its 95 % band; the raw mean thin beneath."""
    curves = [[row.get(key, 0.0) for row in read_rows(folder)] for folder in runs_of(name)]
    if not curves:
        return
    smooth = []
    for curve in curves:
        average, line = curve[0], []
        for x in curve:
            average = SMOOTH * average + (1 - SMOOTH) * x
            line.append(average)
        smooth.append(line)
    x = range(1, min(map(len, curves)) + 1)
    centre, half = zip(*(interval(list(values)) for values in zip(*smooth)))
    axis.plot(x, [sum(values) / len(values) for values in zip(*curves)], color=color, linewidth=0.5, alpha=0.4)
    axis.plot(x, centre, color=color, label=f"{label} ({len(curves)} seeds)")
    axis.fill_between(x, [c - h for c, h in zip(centre, half)], [c + h for c, h in zip(centre, half)], color=color,
                      alpha=0.15, linewidth=0)


def draw(pyplot, path: Path, games: list[str], keys: list[str], variants: dict[str, str]) -> None:
    """A figure: a row a game, a column a metric, a curve a variant (name -> label)."""
    figure, axes = pyplot.subplots(len(games), len(keys), figsize=(4.4 * len(keys), 3.1 * len(games)), squeeze=False,
                                   layout="constrained")
    for game, line in zip(games, axes):
        for key, axis in zip(keys, line):
            for i, (name, label) in enumerate(variants.items()):
                draw_seeds(axis, f"{game}-{name}", key, label, f"C{i}")
            axis.set(title=f"{game}: {PANELS.get(key, key.replace('_', ' '))}", xlabel="iteration")
            axis.set_ylim(0, 1.02 if key == "success" else None)
            row = key == "success" and next(filter(None, (row_of(f"{game}-{name}") for name in variants)), None)
            if row:
                axis.axhline(row["random"][0], color="gray", linestyle=":", label="random play")
        line[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
