"""README keeps its word: its commands run, its links lead somewhere, its environment trains."""
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMANDS = [re.split(r"&&|\s#", line)[-1 if "&&" in line else 0].strip()
            for language, block in BLOCKS if language == "bash" for line in block.splitlines() if "python" in line]
SMALL = ["--iters", "1", "--eval_n", "8", "--groups", "2", "--group_size", "2", "--max_new_tokens", "24",
         "--threads", "1"]
needs_tiny = pytest.mark.skipif(not (ROOT / "tiny" / "config.json").exists(), reason="tiny/ has not been built")


def test_commands_were_found():
    assert sum(command.startswith("python train.py") for command in COMMANDS) >= 6
    assert "python -m pytest -q" in COMMANDS


@needs_tiny
@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if c.startswith("python train.py")}))
def test_train_commands_run(command, tmp_path, monkeypatch, capsys):
    words = command.split()[2:]
    if {"cuda", "--help", "--preset"} & {*words} or "smollm2" in command:   # needs what is not here: it must parse
        assert train.parse_flags(words)
        return
    monkeypatch.chdir(ROOT)
    if "corridor.py:Corridor" in words:
        path = tmp_path / "corridor.py"
        path.write_text(next(block for language, block in BLOCKS if language == "python"))
        words[words.index("corridor.py:Corridor")] = f"{path}:Corridor"
    train.main(words + SMALL + ([] if "--eval_only" in words else ["--out", str(tmp_path / "run")]))
    assert "success" in capsys.readouterr().out
    if "--eval_only" not in words:
        (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert row.keys() <= glossary(), row.keys() - glossary()             # no metric without an explanation
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_n"] == 8


@needs_tiny
@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if re.match(r"python (envs|rollout|starpo|model)\.py", c)}))
def test_demos_run(command):
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, input="q\n", text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout) > 100, done.stderr[-2000:]


@needs_tiny
def test_every_metric_in_the_glossary_is_logged(tmp_path):
    """With a critic, a reference and an evaluation, all of them apply."""
    train.main(["--env", "bandit", "--algo", "starpo", "--estimator", "gae", "--eval_every", "1", *SMALL,
                "--out", str(tmp_path / "run")])
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row.keys() == glossary(), row.keys() ^ glossary()


@needs_tiny
def test_the_environment_in_readme_trains_and_its_reward_rises(tmp_path, monkeypatch):
    """The block as it stands, through the command line with nothing else changed but sizes."""
    path = tmp_path / "corridor.py"
    path.write_text(next(block for language, block in BLOCKS if language == "python"))
    train.main(["--env", f"{path}:Corridor", "--iters", "10", "--groups", "4", "--group_size", "12", "--keep", "0.5",
                "--eval_n", "8", "--eval_every", "0", "--threads", "1", "--out", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (sum(row["reward_mean"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert rows[0]["valid_frac"] > 0.9                                  # the prompt is one that the tiny model reads
    assert last > first + 1, (first, last)
    assert rows[0]["ratio_max_dev"] < 1e-4             # prompts unlike any the tiny model knows


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        if name:
            assert (ROOT / name).exists(), target
        if anchor:
            page = (ROOT / name).read_text() if name else README
            headings = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.M)]
            assert anchor in headings, target


def test_functions_named_in_tables_exist():
    import starpo
    for name in re.findall(r"\[`(\w+)`\]\(starpo\.py\)", README):
        assert callable(getattr(starpo, name)), name


def test_every_flag_named_exists():
    """Every --flag in README is a field of Config, or belongs to a demo or to a tool."""
    fields = {field.name for field in dataclasses.fields(train.Config)}
    tools = "".join((ROOT / name).read_text() for name in ("model.py", "tests/bench.py", "tests/kill.py"))
    others = {"help", "nproc", "nnodes", "rdzv", *re.findall(r'"--([a-z][a-z_]*)"', tools)}     # nproc on: torchrun's
    for flag in set(re.findall(r"--([a-z][a-z_]*)", README)) - others:
        assert flag.removeprefix("no_") in fields, flag


@pytest.mark.parametrize("word", ["--resume", "--eval_only"])
def test_commands_that_take_a_run_folder_parse(word):
    assert f"`{word} runs/" in README
    assert train.parse_flags([word, "runs/NAME"]) == {word[2:]: "runs/NAME"}


def glossary():
    table = README[README.index("| name | meaning | healthy |"):README.index("A run folder holds")]
    return {name for row in table.splitlines()[2:] if "|" in row for name in re.findall(r"\w+", row.split("|")[1])}


def test_readme_is_complete():
    assert "{{" not in README
