"""results/: the monitor, the definition of collapse, the commands of the experiments, the tables made from the runs."""
import doctest
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_train import QUICK, micro, run  # noqa: F401

import train
from results import monitor, plot

SCRIPT = ROOT / "results" / "run.sh"


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def script(*words):
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True)


@pytest.mark.parametrize("module", [monitor, plot])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


# ------------------------------------------------------------------------------------------------- the monitor

def rows(key, start, later, success=0.2):
    return [{key: start, "success": 0.4}] * monitor.START + [{key: x, "success": success} for x in later]


@pytest.mark.parametrize("key", monitor.WATCH)
def test_every_indicator_fires_on_both_sides_of_its_range_and_not_inside(key):
    words, least, most = monitor.WATCH[key]
    n = monitor.PATIENCE
    inside = (least + min(most, 2 * least + 2)) / 2
    assert monitor.echo_trap(rows(key, 3.0, [3.0 * inside] * 50)) == ("", True)
    for share in [least * 0.9] * (least > 0) + [most * 1.1] * math.isfinite(most):
        found, healthy = monitor.echo_trap(rows(key, 3.0, [3.0 * share] * n))
        assert found == f"{words} {100 * share:.0f} % of its start for {n} iterations" and not healthy
        assert monitor.echo_trap(rows(key, 3.0, [3.0 * share] * (n - 1))) == ("", False)             # patience
        assert monitor.echo_trap(rows(key, 3.0, [3.0 * share] * n + [3.0 * inside])) == ("", True)   # it recovered
        well = key not in ("valid_frac", "grad_norm_max")
        assert monitor.echo_trap(rows(key, 3.0, [3.0 * share] * n, success=0.5)) == ("", well)       # it does get better


def test_the_monitor_waits_for_a_start_and_bears_gaps():
    assert monitor.echo_trap([]) == ("", True)
    assert monitor.echo_trap([{"success": 1.0, "entropy": 9.0}, {"success": 0.0, "entropy": 0.0}]) == ("", True)
    gaps = rows("entropy", 1.0, []) + [{"success": 0.1}, {"success": 0.1, "entropy": 0.0}] * monitor.PATIENCE
    assert str(monitor.PATIENCE) in monitor.echo_trap(gaps)[0]
    assert monitor.echo_trap(gaps + [{"success": 0.1}]) == ("", True)        # nothing known now, nothing said
    assert monitor.echo_trap(rows("entropy", 0.0, [0.0] * 9))[1] is False     # 0 of 0: out of range, and no error


def test_a_rollback_takes_its_iterations_back():
    """The second one, too, where the iterations left are no longer without a gap."""
    row = lambda n, entropy, **more: {"iter": n, "entropy": entropy, "success": 0.4 if entropy == 1 else 0.1, **more}
    history = [*(row(n, 1) for n in range(1, 11)), row(11, 0.1), row(12, 0.1, rolled_back_to=10),
               *(row(n, 1) for n in range(13, 16)), row(16, 0.1), row(17, 0.1, rolled_back_to=15), row(18, 1)]
    kept = [x["iter"] for x in monitor.healthy_rows(history)]
    assert kept == [*range(1, 11), 13, 14, 15, 18]
    assert monitor.echo_trap(history) == ("", True)


def test_after_a_rollback_patience_begins_anew():
    """What was out of range before the iteration that was gone back to does not fire again at once."""
    n, bad = monitor.PATIENCE, {"entropy": 0.1, "success": 0.1}
    history = [{"iter": i + 1, "entropy": 1.0, "success": 0.4} for i in range(monitor.START)]
    history += [{"iter": monitor.START + i + 1, **bad} for i in range(n)]
    assert monitor.echo_trap(history)[0]
    history[-1]["rolled_back_to"] = len(history) - 1
    for i in range(1, n + 1):
        history.append({"iter": len(history) + 1, **bad})
        alarm, healthy = monitor.echo_trap(history)
        assert bool(alarm) == (i == n) and not healthy


@pytest.fixture
def fires(monkeypatch):
    """The monitor says so in the iterations given, after two that are not healthy."""
    def at(*iterations):
        monkeypatch.setattr(train, "echo_trap", lambda rows: (
            "entropy 1 % of its start for 5 iterations" if len(rows) in iterations else "",
            not any(i - 2 <= len(rows) <= i for i in iterations)))
    return at


def drop(row):
    return {key: x for key, x in row.items() if key != "seconds"}


def test_an_alarm_alone_changes_nothing(micro, tmp_path, fires, capsys):  # noqa: F811
    run(micro, tmp_path / "quiet", "--iters", 4)
    fires(2, 4)
    run(micro, tmp_path / "loud", "--iters", 4)
    quiet, loud = read(tmp_path / "quiet"), read(tmp_path / "loud")
    assert [row.pop("echo_trap", None) is None for row in loud] == [True, False, True, False]
    assert capsys.readouterr().out.count("echo trap: entropy 1 % of its start for 5 iterations") == 2
    assert list(map(drop, quiet)) == list(map(drop, loud)) and not (tmp_path / "loud" / "healthy").exists()


def test_on_collapse_stop_names_the_last_healthy_weights(micro, tmp_path, fires):  # noqa: F811
    fires(5)
    with pytest.raises(SystemExit) as stop:
        run(micro, tmp_path / "run", "--iters", 9, "--on_collapse", "stop", "--save_every", 1)
    assert "entropy 1 %" in str(stop.value) and str(tmp_path / "run" / "healthy") in str(stop.value)
    assert len(read(tmp_path / "run")) == 5
    assert json.loads((tmp_path / "run" / "healthy" / "trainer.json").read_text())["iteration"] == 2
    assert json.loads((tmp_path / "run" / "checkpoint" / "trainer.json").read_text())["iteration"] == 4


@pytest.mark.parametrize("flags", [[], ["--estimator", "gae"], ["--lora_rank", "2"]])
def test_rollback_restores_and_halves_the_step(micro, tmp_path, fires, flags, monkeypatch):  # noqa: F811
    """After the alarm in iteration 5 weights, factors, critic and moments are those after iteration 2; the learning rate
    is half from then on, and a quarter from the second alarm on, in iteration 9, which goes back to 6."""
    fires(5, 9)
    rates, before, after, take_back = [], {}, {}, train.Run.rollback

    def state(model, critic, optimizers):
        names = {f"{who}.{name}": p for who, module in (("model", model), ("critic", critic)) if module is not None
                 for name, p in module.state_dict().items()}
        moments = {f"{who}.{i}.{slot}": x for who, optimizer in optimizers.items()
                   for i, slots in optimizer.state_dict()["state"].items() for slot, x in slots.items()}
        return {name: x.clone() for name, x in (names | moments).items()}

    def watch(self, model, critic, optimizers):
        back = take_back(self, model, critic, optimizers)
        after[back] = state(model, critic, optimizers)
        return back

    def save(self, iteration, model, tokenizer, critic, optimizers, healthy=False):
        before[iteration] = state(model, critic, optimizers)
        return keep(self, iteration, model, tokenizer, critic, optimizers, healthy)

    def rate(*args, **options):
        rates.append(args[1].param_groups[0]["lr"])
        return update(*args, **options)

    update, keep = train.update, train.Run.save
    monkeypatch.setattr(train.Run, "rollback", watch)
    monkeypatch.setattr(train.Run, "save", save)
    monkeypatch.setattr(train, "update", rate)
    run(micro, tmp_path / "run", "--iters", 10, "--on_collapse", "rollback", "--save_every", 1, "--warmup", 0, *flags)
    assert [row.get("rolled_back_to") for row in read(tmp_path / "run")] == [None] * 4 + [2, None, None, None, 6, None]
    assert rates == [1e-3] * 5 + [5e-4] * 4 + [2.5e-4]
    assert after.keys() == {2, 6}
    for iteration, found in after.items():
        assert found.keys() == before[iteration].keys()
        assert all(torch.equal(x, before[iteration][name]) for name, x in found.items())
        assert any(not torch.equal(x, before[4 if iteration == 2 else 8][name]) for name, x in found.items())


def test_rollback_to_the_start_empties_the_moments(micro, tmp_path, fires, monkeypatch):  # noqa: F811
    fires(3)
    left, take_back = [], train.Run.rollback
    monkeypatch.setattr(train.Run, "rollback", lambda self, model, critic, optimizers: [
        take_back(self, model, critic, optimizers), left.append(optimizers["policy"].state_dict()["state"])][0])
    run(micro, tmp_path / "run", "--iters", 4, "--on_collapse", "rollback", "--save_every", 0)
    assert [row.get("rolled_back_to") for row in read(tmp_path / "run")] == [None, None, 0, None] and left == [{}]


def test_a_kill_between_two_saves_leaves_no_healthy_weights_from_the_future(tmp_path, monkeypatch):
    """checkpoint/ is written before healthy/: a resumed run never goes "back" to an iteration it has not reached."""
    saved = []
    monkeypatch.setattr("model.save_checkpoint", lambda folder, *_: saved.append(folder.name))
    train.Run({"out": str(tmp_path / "run")}, {}).save(4, None, None, None, {}, healthy=True)
    assert saved == ["checkpoint", "healthy"]


@pytest.mark.parametrize("cut", [3, 4, 5, 8])
def test_a_run_with_rollbacks_resumes_alike(micro, tmp_path, fires, cut):  # noqa: F811
    """Cut before and after the first alarm, among iterations that are not healthy, and before the second."""
    fires(4, 9)
    flags = ["--on_collapse", "rollback", "--save_every", 1, "--warmup", 0]
    run(micro, tmp_path / "whole", "--iters", 10, *flags)
    run(micro, tmp_path / "cut", "--iters", cut, *flags)
    train.main(["--resume", str(tmp_path / "cut"), "--iters", "10"])
    assert list(map(drop, read(tmp_path / "whole"))) == list(map(drop, read(tmp_path / "cut")))
    assert [row.get("rolled_back_to") for row in read(tmp_path / "cut")][3::5] == [1, 6]


# ------------------------------------------------------------------------------------------- collapse, intervals

def test_collapse_is_what_was_fixed():
    up, half = [0.4] * 10 + [0.8] * 20, [0.41] * 30
    assert plot.collapse_iteration(up + half) is None                    # above half of the peak
    assert plot.collapse_iteration([0.2] * 10 + [0.8] * 20 + [0.3] * 30) is None       # below half, not below its start
    assert plot.collapse_iteration(up + [0.1] * 30 + [0.9] * 10) is None               # came back
    at = plot.collapse_iteration(up + [0.1] * 30)
    means = plot.trailing_means(up + [0.1] * 30)
    assert means[at - plot.WINDOW] < 0.4 <= means[at - plot.WINDOW - 1]
    assert plot.collapse_iteration([0.5] * 5) is None                    # shorter than the window


def test_interval_is_students():
    mean, half = plot.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.30 / math.sqrt(3))
    assert math.isnan(plot.interval([1.0])[1]) and plot.percent((0.5, math.nan)) == "50.0"


def keep_run(folder, success, std, after=0.5, **config):
    folder.mkdir(parents=True)
    lines = [{"iter": i + 1, "success": x, "reward_std_in_group": y, "optimizer_steps": 4, "seconds": 1.2}
             for i, (x, y) in enumerate(zip(success, std))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({
        "success_before": 0.4, "success_before_greedy": 0.7, "success_after": after, "success_random": 0.2,
        "success_optimal": 1.0, "eval_n": 100}))
    (folder / "config.json").write_text(json.dumps(config))


def test_tables_count_collapses_leads_and_false_alarms(tmp_path, monkeypatch):
    """Seed 1: std low from iteration 21 on, success gone from 31. Seed 2: success a little down, std low: a false alarm.
    Seed 3: fine. Seed 4: success up, std low; nothing to say. Seed 0 is not asked for. Doubles, and runs that the monitor
    changed, do not count."""
    monkeypatch.setattr(plot, "RUNS", tmp_path)
    keep_run(tmp_path / "game-x-seed1", [0.4] * 20 + [0.35] * 10 + [0.0] * 20, [1.0] * 20 + [0.1] * 30, after=0.0)
    keep_run(tmp_path / "game-x-seed2", [0.4] * 20 + [0.35] * 30, [1.0] * 20 + [0.1] * 30, after=0.3)
    keep_run(tmp_path / "game-x-seed3", [0.4] * 50, [1.0] * 50, after=0.6)
    keep_run(tmp_path / "game-x-seed4", [0.4] * 10 + [0.9] * 40, [1.0] * 20 + [0.1] * 30, after=0.9)
    keep_run(tmp_path / "game-x-seed0", [0.4] * 50, [1.0] * 50)
    keep_run(tmp_path / "game-y-seed2", [0.4] * 20 + [0.35] * 30, [1.0] * 20 + [0.1] * 30, after=0.3)
    keep_run(tmp_path / "game-z-seed2", [0.4] * 20 + [0.3] * 30, [1.0] * 20 + [0.1] * 30, on_collapse="rollback")
    row = plot.row_of("game-x")
    assert row["seeds"] == 5 and row["collapsed"] == [None, 35, None, None, None] and row["steps"] == 4.0
    assert row["end"][0] == pytest.approx((0.4 + 0.0 + 0.35 + 0.4 + 0.9) / 5) and row["minutes"] == pytest.approx(1.0)
    assert "| 20, 40, 70, 100 |" in plot.table(["game-x"]) and "| 1 of 5 (35) |" in plot.table(["game-x"])
    assert "| 30.0 +- 9.0 | 30.0 |" in plot.table(["game-y"])               # one seed: over its 100 levels
    assert plot.table(["game-x", "game-w"]).endswith("Not run yet: `game-w`.") and "Not run" not in plot.table(["game-x"])
    lines = {line.split(" | ")[0].strip("| "): line for line in plot.monitor_table((1, 2, 3, 4)).splitlines()}
    assert "(1 runs)" in lines["indicator"] and "other runs (3)" in lines["indicator"]
    assert lines["any"] == "| any | 1 | 10 | 1 | 10 | 0 | 0 | 2 | 1 |"
    assert lines["entropy"] == "| entropy | 0 | - | 0 | - | 0 | 1 | 0 | 0 |"


def test_figures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    monkeypatch.setattr(plot, "RUNS", tmp_path)
    monkeypatch.setenv("RESULTS", str(tmp_path))
    for name in ("bandit-starpo-seed0", "bandit-starpo-seed1", "bandit-starpo-s-seed0"):
        keep_run(tmp_path / name, [0.4] * 20, [1.0] * 20)
    plot.main(["collapse.png"])
    assert [path.name for path in tmp_path.glob("*.png")] == ["collapse.png"]
    assert (tmp_path / "collapse.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ the commands

def experiments():
    return sorted({name for line in script().stdout.splitlines() for name in line.split(":")[1].split()})


def test_every_experiment_is_a_command_that_parses(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = experiments()
    assert len(names) > 40
    for name in names:
        shown = script("--flags", name)
        assert shown.returncode == 0, shown.stderr
        train.configure([*shown.stdout.split(), "--seed", "0", "--out", str(tmp_path / name)])


@pytest.mark.parametrize("name", ["nonsense", "bandit-nonsense", "sokoban-"])
def test_a_wrong_name_is_one_line(name):
    found = script(name)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1 and "no experiment" in found.stderr


STUB = """#!/bin/bash
echo "$@" >> calls
echo "success 1"
while [ $# -gt 0 ]; do case $1 in --out|--resume) out=$2;; esac; shift; done
mkdir -p "$out/checkpoint" && touch "$out/config.json" "$out/metrics.jsonl"
[ -f fail ] && echo "train.py: no luck" && touch "$out/checkpoint/trainer.json" && exit 1
touch "$out/summary.json"
"""


def test_the_script_skips_what_is_done_and_goes_on_with_what_was_stopped(tmp_path):
    """With a stub instead of python, in a folder of its own."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.sh").write_text(SCRIPT.read_text())
    (tmp_path / "results" / "run.sh").chmod(0o755)
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)

    def call(*words, **names):
        names = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "stub"), **names}
        found = subprocess.run(["bash", str(tmp_path / "results" / "run.sh"), *words], capture_output=True, text=True,
                               env=names, timeout=60)
        calls = tmp_path / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return found, lines

    (tmp_path / "fail").touch()
    found, calls = call("bandit-starpo", "7")
    assert found.returncode and "no luck" in found.stderr and "bandit-starpo-seed7.log" in found.stderr and len(calls) == 1
    (tmp_path / "fail").unlink()
    (tmp_path / "runs" / "echo" / "bandit-starpo-seed7.lock").write_text("999999999")       # left by a kill
    found, calls = call("collapse", "7", "8")
    assert found.returncode == 0 and len(calls) == 4 and sum("--resume runs/echo/bandit-starpo-seed7" in x for x in calls) == 1
    assert sorted(path.name for path in (tmp_path / "results" / "echo").iterdir()) == [
        f"bandit-starpo{s}-seed{n}" for s in ("-s", "") for n in (7, 8)]
    assert not list((tmp_path / "runs" / "echo").glob("*.lock"))
    assert call("collapse", "7", "8")[1] == []
    again, calls = call("collapse", "7", RESULTS="mine")                                     # another folder: run again
    assert len(calls) == 2 and (tmp_path / "mine" / "bandit-starpo-seed7" / "summary.json").exists()
    assert all("runs/mine/" in x for x in calls)
    _, calls = call("sokoban-sft-starpo-s", "1")                                             # its own start comes first
    assert ["--algo sft" in x for x in calls] == [True, False]
    assert "--model runs/echo/sokoban-sft-seed1/checkpoint" in calls[1]
    _, calls = call("f10", "7")                                                # train, evaluate elsewhere, and the start
    assert [x.split()[:2] for x in calls[1:]] == [
        ["train.py", "--eval_only"]] * 2 and "runs/echo/sokoban-starpo-s-seed7" in calls[1] and "tiny" in calls[2]
    assert (tmp_path / "results" / "echo" / "elsewhere-seed7.txt").read_text() == "success 1\n"
    assert call("f10", "7")[1] == []
    _, calls = call("smollm2", "7", MODEL="folder")                            # four trainings, each evaluated elsewhere
    assert ["--eval_only" in x for x in calls] == [False, True] * 4
    assert [("--model folder" in x, "--no_think" in x) for x in calls[::2]] == [
        (True, False), (False, False), (True, True), (False, True)]
    assert call("smollm2", "7")[1] == []


def test_what_is_quoted_was_run_as_the_script_says(tmp_path):
    """config.json of every run kept says what results/run.sh says today."""
    kept = sorted((ROOT / "results" / "echo").glob("*-seed*/config.json"))
    names = set(experiments())
    assert len(kept) > 50
    for path in kept:
        name, seed = re.fullmatch(r"(.*)-seed(\d+)", path.parent.name).groups()
        assert name in names, path
        words = script("--flags", name).stdout.replace("SEED", seed).split()
        saved = json.loads(path.read_text())
        wanted = vars(train.configure([*words, "--seed", seed, "--out", str(tmp_path / path.parent.name)]))
        apart = {key for key in wanted if key not in ("out", "resume") and saved.get(key) != wanted[key]}
        assert not apart, (path, apart)


def test_tables_and_figures_are_those_of_the_runs():
    """results/README.md holds what results/plot.py makes of results/echo today."""
    text = (ROOT / "results" / "README.md").read_text()
    assert plot.fill_tables(text) == text
    for name in re.findall(r"\]\(([\w-]+\.png)\)", text):
        assert (ROOT / "results" / name).exists(), name
