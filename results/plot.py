"""Draw the curves of a run: python results/plot.py runs/NAME  ->  runs/NAME/curves.png. Needs matplotlib."""
import json
import sys
from pathlib import Path

PANELS = {"success": "success", "reward_std_in_group": "reward std in group", "entropy": "entropy (nats a token)",
          "grad_norm_max": "largest gradient norm"}


def draw_run(folder: Path) -> None:
    """curves.png in a run folder: success, in-group reward std, entropy, gradient norm. Without matplotlib, one line."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("curves.png: skipped, matplotlib is not installed (pip install matplotlib)")
        return
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw_run(Path(name))
