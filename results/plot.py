"""Curves of a run, and the figures and tables of results/README.md.

    python results/plot.py runs/NAME    # runs/NAME/curves.png (needs matplotlib)
    python results/plot.py              # all figures (results/*.png) and all tables (in results/README.md), from the
                                        # runs in results/echo that results/run.sh made
    RESULTS=mine python results/plot.py collapse.png    # mine/collapse.png, from the runs in mine/
"""
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from results import monitor         # noqa: E402

RUNS = Path(os.environ.get("RESULTS", HERE / "echo"))                # where the runs of experiments lie
PANELS = {"success": "success", "reward_std_in_group": "reward std in group", "entropy": "entropy (nats a token)",
          "grad_norm_max": "largest gradient norm"}
TITLES = PANELS | {"valid_frac": "valid replies", "distinct_reply_frac": "distinct first replies in a group",
                   "reply_len": "tokens a reply", "actions_per_episode": "actions an episode",
                   "repeated_thought_frac": "commonest thought", "thought_len": "words a thought"}
FRAME = ("random", "before", "before_greedy", "optimal")      # what a run's success stands between
WINDOW = 10             # iterations of the mean that "success" is judged by
SMOOTH = 0.8            # weight of the past in the drawn moving average; the raw curve lies beneath
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}     # Student's t: 95 %, so many seeds


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

def show(rate: float | None, n: int = 0) -> str:
    """A success rate; with its 95 % interval where it is one of n episodes (normal approximation); a dash if unknown."""
    half = f" +- {1.96 * math.sqrt(rate * (1 - rate) / n):.3f}" if n and rate is not None else ""
    return "-" if rate is None else f"{rate:.3f}{half}"


def print_summary(summary: dict, env: str, temperature: float) -> None:
    """The closing table of a run, from its summary.json."""
    n = summary["eval_n"]
    print(f"success on {n} held-out levels of {env}, temperature {temperature}")
    for key in ("random", "before_greedy", "before", "after", "optimal"):
        print(f"  {key.replace('_', ', '):16s} {show(summary[f'success_{key}'], n * (key not in ('random', 'optimal')))}")
    print(f"  gain             {summary['gain']:.3f} +- {summary['gain_ci95']:.3f}\n"
          f"{summary['seen_in_training']:.1%} of these levels came up in training, too\ntime: "
          + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["time"].items()))


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
    26
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
    return mean, (T95.get(n, T95[8]) if n > 1 else math.nan) * math.sqrt(sum((x - mean) ** 2 for x in values) / max(1, n - 1) / n)


def runs_of(name: str) -> list[Path]:
    """The finished runs of an experiment, by seed."""
    return [path.parent for path in sorted(RUNS.glob(f"{name}-seed*/summary.json"))]


def row_of(name: str) -> dict | None:
    """What is said of an experiment: numbers over its seeds. None if no run of it is there."""
    folders = runs_of(name)
    if not folders:
        return None
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    successes = [[row["success"] for row in read_rows(folder)] for folder in folders]
    means, after = [trailing_means(success) for success in successes], [s["success_after"] for s in summaries]
    levels = 1.96 * math.sqrt(after[0] * (1 - after[0]) / summaries[0]["eval_n"])           # for a single seed
    frame = {key: sum(s[f"success_{key}"] for s in summaries) / len(summaries) for key in FRAME}
    return {"seeds": len(folders), "after": interval(after) if len(after) > 1 else (after[0], levels), **frame,
            "each": after, "peak": interval([max(m) for m in means]),
            "end": interval([m[-1] for m in means]), "collapsed": [collapse_iteration(s) for s in successes],
            "steps": statistics.mean(row["optimizer_steps"] for folder in folders for row in read_rows(folder)),
            "minutes": sum(row["seconds"] for folder in folders for row in read_rows(folder)) / 60 / len(folders)}


def percent(pair: tuple[float, float]) -> str:
    """(0.5, 0.1) -> 50.0 +- 10.0."""
    return f"{100 * pair[0]:.1f}" + ("" if math.isnan(pair[1]) else f" +- {100 * pair[1]:.1f}")


def table(names: list[str]) -> str:
    """Markdown: an experiment a line. Success in percent; +- is a 95 % interval over seeds, of a single seed over
    levels."""
    lines = ["| experiment | seeds | steps an iteration | random, start, greedy start, optimal | peak, training | end, training "
             "| held out, after | each seed | collapsed, at iteration | minutes of training |", "|" + "---|" * 10]
    rows = {name: row_of(name) for name in names}
    for name, row in ((name, row) for name, row in rows.items() if row):
        fallen = [str(at) for at in row["collapsed"] if at]
        frame = ", ".join(f"{100 * row[key]:.0f}" for key in FRAME)
        lines.append(
            f"| {name} | {row['seeds']} | {row['steps']:.1f} | {frame} | {percent(row['peak'])} | {percent(row['end'])} "
            f"| {percent(row['after'])} | {', '.join(f'{100 * x:.1f}' for x in row['each'])} "
            f"| {len(fallen)} of {row['seeds']}{' (' + ', '.join(fallen) + ')' if fallen else ''} "
            f"| {row['minutes']:.1f} |")
    missing = [f"`{name}`" for name, row in rows.items() if not row]
    return "\n".join(lines + ["", f"Not run yet: {', '.join(missing)}."] * bool(missing))


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
    axis.plot(x, centre, color=color, label=label)
    axis.fill_between(x, [c - h for c, h in zip(centre, half)], [c + h for c, h in zip(centre, half)], color=color,
                      alpha=0.12, linewidth=0)


def draw(pyplot, path: Path, games: list[str], keys: list[str], variants: dict[str, str]) -> None:
    """A figure: a row a game, a column a metric, a curve a variant (name -> label)."""
    figure, axes = pyplot.subplots(len(games), len(keys), figsize=(4.4 * len(keys), 3.1 * len(games)), squeeze=False,
                                   layout="constrained")
    for game, line in zip(games, axes):
        for key, axis in zip(keys, line):
            for i, (name, label) in enumerate(variants.items()):
                seeds = sorted({len(runs_of(f"{game}-{name}")) for game in games} - {0})
                label += f" ({' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])})"
                draw_seeds(axis, f"{game}-{name}", key, label, f"C{i}")
            axis.set(title=f"{game}: {TITLES[key]}", xlabel="iteration")
            axis.set_ylim(0, 1.02 if key == "success" or key.endswith("_frac") else None)
            row = key == "success" and next(filter(None, (row_of(f"{game}-{name}") for name in variants)), None)
            if row:
                axis.axhline(row["random"], color="gray", linestyle=":", label="random play")
    shown = {label: line for axis in axes[:, 0] for line, label in zip(*axis.get_legend_handles_labels())}
    last = sorted(shown, key="random play".__eq__)
    lines = -(-sum(map(len, last)) // (34 * len(keys)))             # as many as the width of the figure takes
    figure.legend([shown[x] for x in last], last, loc="outside upper center", ncols=-(-len(last) // lines))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ the findings

def experiments() -> dict[str, list[str]]:
    """Finding -> names of its experiments, as results/run.sh lists them."""
    listed = subprocess.run(["bash", str(HERE / "run.sh")], capture_output=True, text=True, check=True).stdout
    return {finding: names.split() for finding, names in (line.split(":") for line in listed.splitlines())}


def factorial_table(names: list[str]) -> str:
    """Finding 5: a line a setting of the estimator, a column a payout of the safe arm."""
    lines = ["| luck of a group | divided by the std | groups kept | the risky arm is better (0.15) | the safe arm is better "
             "(0.35) |", "|" + "---|" * 5]
    for name in names:
        _, noise, norm, keep, low = name.split("-")
        if low == "0.15":
            cells = [row_of(f"bandit-{noise}-{norm}-{keep}-{x}") for x in ("0.15", "0.35")]
            cells = [f"{percent(row['after'])} ({', '.join(f'{100 * x:.0f}' for x in row['each'])})" if row else "not run"
                     for row in cells]
            lines.append(f"| {noise} | {'yes' if norm == 'std' else 'no'} | {float(keep):.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def alarms(rows: list[dict]) -> dict[str, int]:
    """Indicator -> the first iteration at which the monitor fires because of it; "any": because of one of them."""
    first = {}
    for n in range(1, len(rows) + 1):
        for alarm in filter(None, monitor.echo_trap(rows[:n])[0].split(", ")):
            first.setdefault(re.sub(r" \d+ %.*", "", alarm), n)
            first.setdefault("any", n)
    return first


def leaves(rows: list[dict], key: str) -> int | None:
    """The first iteration at which an indicator has been out of its range for PATIENCE iterations, whatever the success."""
    numbers = [row["iter"] for row in rows if row.get(key) is not None][monitor.START:]
    out, _ = monitor.outside(rows, key)
    n = monitor.PATIENCE
    return next((numbers[i + n - 1] for i in range(len(out) - n + 1) if all(out[i:i + n])), None)


def monitor_table(seeds: tuple[int, ...], game: str = "") -> str:
    """Finding 2: how early each indicator leaves its range, and how often the monitor is right. Of runs that are the same
    under two names one is counted; those that the monitor changed are not."""
    fallen, healthy, seen = [], [], set()
    for path in sorted(RUNS.glob(f"{game}*-seed*/summary.json")):
        rows, config = read_rows(path.parent), json.loads((path.parent / "config.json").read_text())
        same = str([{key: x for key, x in row.items() if key != "seconds"} for row in rows])
        if int(path.parent.name.rpartition("seed")[2]) in seeds and not config.get("on_collapse") and same not in seen:
            seen.add(same)
            at = collapse_iteration([row["success"] for row in rows])
            (fallen if at else healthy).append((at, rows, alarms(rows)))
    lines = [f"| indicator | collapses ({len(fallen)} runs): leaves its range before | by iterations, median | alarm before "
             f"| by iterations, median | alarm too late | no alarm | other runs ({len(healthy)}): leaves its range | alarm |",
             "|" + "---|" * 9]
    middle = lambda leads: f"{statistics.median(leads):g}" if leads else "-"
    for key, name in [(None, "any"), *((key, words) for key, (words, *_) in monitor.WATCH.items())]:
        left = lambda rows: min(filter(None, (leaves(rows, k) for k in ([key] if key else monitor.WATCH))), default=None)
        early = [at - left(rows) for at, rows, _ in fallen if (left(rows) or at) < at]
        leads = [at - first[name] for at, _, first in fallen if name in first]
        right = [lead for lead in leads if lead > 0]
        lines.append(f"| {name} | {len(early)} | {middle(early)} | {len(right)} | {middle(right)} | {len(leads) - len(right)} "
                     f"| {len(fallen) - len(leads)} | {sum(bool(left(rows)) for _, rows, _ in healthy)} "
                     f"| {sum(name in first for *_, first in healthy)} |")
    return "\n".join(lines)


def fill_tables(text: str) -> str:
    """results/README.md with every table between <!-- table NAME --> and <!-- end --> made anew."""
    names = experiments()

    def make(match):
        name = match[1]
        if name.startswith("monitor"):
            _, game, *seeds = name.split()
            made = monitor_table(tuple(map(int, seeds)), game)
        else:
            finding, _, game = name.partition(" ")
            wanted = [x for x in names[finding] if x.startswith(game)]
            made = factorial_table(wanted) if finding == "f5" else table(wanted)
        return f"<!-- table {name} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- table ([^>]*) -->.*?<!-- end -->", make, text, flags=re.S)


FIGURES = {     # file: games, metrics, experiments and their labels
    "starpo-s.png": (["bandit", "sokoban"], ["success", "reward_std_in_group", "entropy", "valid_frac"], {
        "starpo": "StarPO, GRPO", "starpo-s": "StarPO-S, GRPO", "starpo-s-steps": "StarPO-S, steps matched",
        "starpo-gae": "StarPO, PPO", "starpo-s-gae": "StarPO-S, PPO"}),
    "collapse.png": (["bandit"], ["success", "reward_std_in_group", "distinct_reply_frac"], {
        "starpo": "StarPO", "starpo-s": "StarPO-S"}),
    "signs.png": (["bandit", "sokoban"], ["success", "reward_std_in_group", "valid_frac", "repeated_thought_frac",
                                          "grad_norm_max"], {"starpo": "StarPO", "starpo-s": "StarPO-S"}),
    "estimator.png": (["bandit"], ["success", "reward_std_in_group"], {
        "shared-std-1-0.15": "risky arm better: std, all", "shared-std-0.25-0.15": "risky arm: std, 25 %",
        "shared-nostd-1-0.15": "risky arm: no std, all",
        "shared-std-1-0.35": "safe arm better: std, all", "shared-std-0.25-0.35": "safe arm: std, 25 %",
        "shared-nostd-1-0.35": "safe arm: no std, all"}),
    "keep.png": (["bandit", "sokoban"], ["success", "reward_std_in_group"], {
        "starpo": "all groups", "keep75": "75 %", "keep50": "50 %", "keep25": "25 %"}),
    "keep-steps.png": (["bandit", "sokoban"], ["success", "reward_std_in_group"], {
        "starpo": "all groups", "keep75-steps": "75 %", "keep50-steps": "50 %", "keep25-steps": "25 %"}),
    "switches.png": (["bandit", "sokoban"], ["success", "entropy"], {
        "starpo": "StarPO", "no-kl": "without KL", "clip-high": "clip 0.28 above"}),
    "penalty.png": (["sokoban"], ["success", "valid_frac", "reply_len"], {
        "starpo": "StarPO", "starpo-s": "StarPO-S", "starpo-penalty": "StarPO, format penalty 1",
        "penalty": "StarPO-S, format penalty 1", "rollback": "StarPO, rollback"}),
    "long.png": (["bandit", "sokoban"], ["success", "valid_frac", "entropy"], {
        "long": "StarPO-S", "long-penalty": "format penalty 1", "long-step": "learning rate 1e-4",
        "long-rollback": "rollback"}),
    "frozenlake.png": (["frozenlake"], ["success", "reward_std_in_group", "valid_frac"], {
        "starpo": "StarPO", "starpo-s-quarter": "StarPO-S"}),
    "prompts.png": (["sokoban"], ["success", "reward_std_in_group", "valid_frac"], {
        "prompts32": "32 levels x 2", "prompts16": "16 x 4", "starpo-s": "8 x 8", "prompts4": "4 x 16",
        "prompts2": "2 x 32"}),
    "think.png": (["bandit", "sokoban"], ["success", "thought_len", "reply_len"], {
        "starpo-s": "with thoughts", "no-think": "without"}),
}


def main(words: list[str]) -> None:
    elsewhere, readme = "RESULTS" in os.environ, HERE / "README.md"
    wrong = [word for word in words if word not in FIGURES and not (Path(word) / "metrics.jsonl").exists()]
    if wrong:
        sys.exit(f"plot.py: {wrong[0]} is neither a run folder nor one of {', '.join(FIGURES)}")
    for word in words:
        if word not in FIGURES:
            draw_run(Path(word))
    if not words and elsewhere:
        print(*(fill_tables(f"<!-- table {name} --><!-- end -->") for name in experiments() if name != "f2"), sep="\n\n")
    elif not words:
        readme.write_text(fill_tables(readme.read_text()))
    pyplot = pyplot_or_none()
    for name, (games, keys, variants) in FIGURES.items() if pyplot else ():
        there = [game for game in games if sum(bool(runs_of(f"{game}-{v}")) for v in variants) > 1]    # to compare
        if there and (name in words or not words):
            draw(pyplot, (RUNS if elsewhere else HERE) / name, there, keys, variants)
        elif name in words:
            sys.exit(f"plot.py: {RUNS} holds none of the runs that {name} shows")


if __name__ == "__main__":
    main(sys.argv[1:])
