"""results/: the monitor, the definition of collapse, the commands of the experiments, the tables made from the runs."""
import doctest
import json
import math
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
        assert monitor.echo_trap(rows(key, 3.0, [3.0 * share] * n, success=0.5)) == ("", True)       # it does get better


def test_the_monitor_waits_for_a_start_and_bears_gaps():
    assert monitor.echo_trap([]) == ("", True)
    assert monitor.echo_trap([{"success": 1.0, "entropy": 9.0}, {"success": 0.0, "entropy": 0.0}]) == ("", True)
    gaps = rows("entropy", 1.0, []) + [{"success": 0.1}, {"success": 0.1, "entropy": 0.0}] * monitor.PATIENCE
    assert str(monitor.PATIENCE) in monitor.echo_trap(gaps)[0]
    assert monitor.echo_trap(rows("entropy", 0.0, [0.0] * 9))[1] is False     # 0 of 0: out of range, and no error


def test_a_rollback_takes_its_iterations_back():
    bad, good = {"entropy": 0.1, "success": 0.1}, {"entropy": 1, "success": 0.4}
    history = [good] * 5 + [bad] * 2 + [bad | {"rolled_back_to": 5}, {"entropy": 1, "success": 0.3}]
    assert monitor.healthy_rows(history) == [good] * 5 + [{"entropy": 1, "success": 0.3}]
    assert monitor.echo_trap(history) == ("", True)


@pytest.fixture
def fires(monkeypatch):
    """The monitor says so in the iterations given, and that nothing is healthy from two before on."""
    def at(*iterations):
        monkeypatch.setattr(train, "echo_trap", lambda rows: (
            "entropy 1 % of its start for 5 iterations" if len(rows) in iterations else "",
            all(len(rows) < i - 2 for i in iterations)))
    return at


def test_an_alarm_alone_changes_nothing(micro, tmp_path, fires, capsys):  # noqa: F811
    run(micro, tmp_path / "quiet", "--iters", 4)
    fires(2, 4)
    run(micro, tmp_path / "loud", "--iters", 4)
    quiet, loud = read(tmp_path / "quiet"), read(tmp_path / "loud")
    assert [row.pop("echo_trap", None) is None for row in loud] == [True, False, True, False]
    assert capsys.readouterr().out.count("echo trap: entropy 1 % of its start for 5 iterations") == 2
    drop = lambda row: {key: x for key, x in row.items() if key != "seconds"}
    assert list(map(drop, quiet)) == list(map(drop, loud))


def test_on_collapse_stop_keeps_the_last_healthy_checkpoint(micro, tmp_path, fires):  # noqa: F811
    fires(5)
    with pytest.raises(SystemExit) as stop:
        run(micro, tmp_path / "run", "--iters", 9, "--on_collapse", "stop", "--save_every", 1)
    assert "entropy 1 %" in str(stop.value) and str(tmp_path / "run" / "checkpoint") in str(stop.value)
    assert len(read(tmp_path / "run")) == 5
    state = json.loads((tmp_path / "run" / "checkpoint" / "trainer.json").read_text())
    assert state["iteration"] == 2                                       # 3 and 4 were not healthy


@pytest.mark.parametrize("flags", [[], ["--estimator", "gae"], ["--lora_rank", "2"]])
def test_rollback_restores_and_halves_the_step(micro, tmp_path, fires, flags, monkeypatch):  # noqa: F811
    """After the alarm in iteration 5 weights, critic and moments are those saved after iteration 2; the learning rate is
    half from then on; a second alarm halves it again; a resumed run goes the same way."""
    fires(5)
    seen, rates, take_back = [], [], train.Run.rollback

    def watch(self, model, critic, optimizers):
        found = take_back(self, model, critic, optimizers)
        seen.append({name: p.clone() for name, p in model.state_dict().items()})
        assert optimizers["policy"].state_dict()["state"][0]["step"] == 2
        return found

    def rate(*args, **options):
        rates.append(args[1].param_groups[0]["lr"])
        return update(*args, **options)

    update = train.update
    monkeypatch.setattr(train.Run, "rollback", watch)
    monkeypatch.setattr(train, "update", rate)
    base = ["--warmup", 0, "--noise", "independent", *flags]
    run(micro, tmp_path / "two", "--iters", 2, *base)
    rates.clear()
    run(micro, tmp_path / "run", "--iters", 7, "--on_collapse", "rollback", "--save_every", 1, *base)
    assert [row.get("rolled_back_to") for row in read(tmp_path / "run")] == [None] * 4 + [2, None, None]
    assert rates == [1e-3] * 5 + [5e-4] * 2
    stored = load_file(tmp_path / "two" / "checkpoint" / "model.safetensors")
    if not any("lora" in str(flag) for flag in flags):                   # with LoRA the file holds merged weights
        assert all(torch.equal(seen[0][name], weight) for name, weight in stored.items())


def test_rollback_before_any_save_goes_to_the_start(micro, tmp_path, fires):  # noqa: F811
    fires(2)
    run(micro, tmp_path / "run", "--iters", 3, "--on_collapse", "rollback", "--save_every", 0)
    assert [row.get("rolled_back_to") for row in read(tmp_path / "run")] == [None, 0, None]


def test_a_run_that_was_rolled_back_resumes_alike(micro, tmp_path, fires):  # noqa: F811
    fires(3)
    flags = ["--on_collapse", "rollback", "--save_every", 1, "--warmup", 0]
    run(micro, tmp_path / "whole", "--iters", 6, *flags)
    run(micro, tmp_path / "cut", "--iters", 5, *flags)
    train.main(["--resume", str(tmp_path / "cut"), "--iters", "6"])
    drop = lambda row: {key: x for key, x in row.items() if key != "seconds"}
    assert list(map(drop, read(tmp_path / "whole"))) == list(map(drop, read(tmp_path / "cut")))


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


def keep_run(folder, success, std, after=0.5):
    folder.mkdir(parents=True)
    lines = [{"iter": i + 1, "success": x, "reward_std_in_group": y, "optimizer_steps": 4}
             for i, (x, y) in enumerate(zip(success, std))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({
        "success_before": 0.4, "success_after": after, "success_random": 0.2, "success_optimal": 1.0, "seconds": 90}))


def test_tables_count_collapses_leads_and_false_alarms(tmp_path, monkeypatch):
    """Seed 1: std low from iteration 21 on, success gone from 31. Seed 2: success a little down, std low: a false alarm.
    Seed 3: fine. Seed 0 is not asked for."""
    monkeypatch.setattr(plot, "RUNS", tmp_path)
    keep_run(tmp_path / "game-x-seed1", [0.4] * 20 + [0.35] * 10 + [0.0] * 20, [1.0] * 20 + [0.1] * 30, after=0.0)
    keep_run(tmp_path / "game-x-seed2", [0.4] * 20 + [0.35] * 30, [1.0] * 20 + [0.1] * 30, after=0.3)
    keep_run(tmp_path / "game-x-seed3", [0.4] * 50, [1.0] * 50, after=0.6)
    keep_run(tmp_path / "game-x-seed0", [0.4] * 50, [1.0] * 50)
    row = plot.row_of("game-x")
    assert row["seeds"] == 4 and row["collapsed"] == [None, 35, None, None] and row["steps"] == 4.0
    assert row["end"][0] == pytest.approx((0.4 + 0.0 + 0.35 + 0.4) / 4) and row["minutes"] == 1.5
    assert "| 1 of 4 (35) |" in plot.table(["game-x", "game-y"]) and "| game-y | not run |" in plot.table(["game-x", "game-y"])
    lines = {line.split(" | ")[0].strip("| "): line for line in plot.monitor_table((1, 2, 3)).splitlines()}
    assert "(1 runs)" in lines["indicator"] and "(2 runs that do not collapse)" in lines["indicator"]
    assert lines["any"] == "| any | 1 | 10 | 0 | 0 | 1 |" and lines["entropy"] == "| entropy | 0 | - | 0 | 1 | 0 |"


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


def test_what_is_quoted_was_run_as_the_script_says():
    """config.json of every run kept says what results/run.sh says today."""
    kept = sorted((ROOT / "results" / "echo").glob("*-seed*/config.json"))
    names = set(experiments())
    for path in kept:
        name, seed = re.fullmatch(r"(.*)-seed(\d+)", path.parent.name).groups()
        if name not in names:
            continue
        words = script("--flags", name).stdout.split()
        saved = json.loads(path.read_text())
        given = train.parse_flags([*words, "--seed", seed])
        assert {key: saved[key] for key in given} == given, path


def test_tables_and_figures_are_those_of_the_runs():
    """results/README.md holds what results/plot.py makes of results/echo today."""
    text = (ROOT / "results" / "README.md").read_text()
    assert plot.fill_tables(text) == text
    for name in re.findall(r"\]\(([\w-]+\.png)\)", text):
        assert (ROOT / "results" / name).exists(), name
