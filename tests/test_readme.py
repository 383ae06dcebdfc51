"""README keeps its word: its commands run, its links lead somewhere, its environment trains."""
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    if "cuda" in words or "--help" in words:                # needs what is not here: it must parse at least
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
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_n"] == 8


@needs_tiny
@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if re.match(r"python (envs|rollout|starpo|model)\.py", c)}))
def test_demos_run(command):
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, input="q\n", text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout) > 100, done.stderr[-2000:]


@needs_tiny
def test_the_environment_in_readme_trains_and_its_reward_rises(tmp_path, monkeypatch):
    """The block as it stands, through the command line with nothing else changed but sizes."""
    path = tmp_path / "corridor.py"
    path.write_text(next(block for language, block in BLOCKS if language == "python"))
    train.main(["--env", f"{path}:Corridor", "--iters", "10", "--eval_n", "32", "--eval_every", "0", "--threads", "1",
                "--out", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (sum(row["reward_mean"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.5, (first, last)
    assert rows[0]["ratio_max_dev"] < 1e-4             # prompts unlike any the tiny model knows


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        if name:
            assert (ROOT / name).exists(), target
        if anchor:
            headings = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)]
            assert anchor in headings, target


def test_functions_named_in_tables_exist():
    import starpo
    for name in re.findall(r"\[`(\w+)`\]\(starpo\.py\)", README):
        assert callable(getattr(starpo, name)), name


def test_metrics_in_the_glossary_are_logged(tmp_path):
    """Every name in the glossary is a key that the code writes."""
    source = "".join((ROOT / name).read_text() for name in ("starpo.py", "train.py"))
    table = README[README.index("| name | meaning | healthy |"):README.index("A run folder holds")]
    for row in table.splitlines()[2:]:
        for name in re.findall(r"\w+", row.split("|")[1]) if "|" in row else []:
            assert f'"{name}"' in source or name.removesuffix("_max") in source, name


def test_readme_is_complete():
    assert "{{" not in README
