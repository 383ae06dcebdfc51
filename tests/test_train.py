"""train.py: what a run leaves behind, that resuming and evaluating do not bend it, that every bad flag is one line, and
that it learns."""
import dataclasses
import doctest
import json
import math
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, micro_gpt2, micro_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import train
from results import plot
from rollout import rollout
from train import Config, noise_seed, play_groups, sample_seed, train_seed

QUICK = ("--groups 2 --group_size 3 --eval_n 3 --max_new_tokens 10 --max_turns 2 --max_actions 4 --eval_every 0 "
         "--keep 1 --lr 1e-3 --device cpu --threads 1").split()
ALWAYS = set("iter success reward_mean reward_std_in_group zero_var_frac groups_kept optimizer_steps entropy grad_norm "
             "grad_norm_max kl_old clip_frac ratio_max_dev valid_frac context_cut_frac actions_per_episode reply_len "
             "thought_len distinct_reply_frac repeated_thought_frac pass_at_g tokens seconds".split())
SUMMARY = set("success_before success_before_greedy success_after success_random success_optimal eval_n iters "
              "seconds".split())
PICK = '''
class Pick:
    """Says which word pays, now and then another one than before."""
    actions = ("Up", "Down", "Left", "Right")
    max_turns = max_actions = max_actions_per_turn = 1
    instruction = "Say Up, it pays."

    def reset(self, seed):
        return f"level {seed % 50}", {}

    def step(self, action):
        self.success = action == "Up"
        return "", float(action == "Up"), True, False, {}


class NoStep:
    def reset(self, seed):
        return "", {}


class BadReset(Pick):
    def reset(self, seed):
        return "no info"


class OldStep(Pick):
    def step(self, action):
        return "", 0.0, True, {}


class KeywordSeed(Pick):
    def reset(self, *, level):
        return "", {}
'''


@pytest.fixture(scope="module")
def micro(tmp_path_factory, tok):
    """A model folder for --model."""
    path = tmp_path_factory.mktemp("models") / "micro"
    micro_llama(tok).save_pretrained(path)
    tok.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Curves take longer than these runs: one test draws them."""
    if request.node.name != "test_curves":
        monkeypatch.setattr(plot, "draw_run", lambda folder: None)


@pytest.fixture
def user(tmp_path):
    (tmp_path / "pick.py").write_text(PICK)
    return str(tmp_path / "pick.py")


def run(micro, out, *flags):
    """train.main on the micro model -> the rows of metrics.jsonl."""
    train.main(["--model", micro, "--out", str(out), *QUICK, *map(str, flags)])
    return read(out)


def read(out):
    """The rows of metrics.jsonl; NaN and the like are no JSON."""
    refuse = lambda word: pytest.fail(f"{word} is not JSON")
    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out):
    """Everything a checkpoint holds, as tensors, and the trainer's state."""
    folder = out / "checkpoint"
    tensors = {(path.name, key): value for path in folder.glob("*.safetensors")
               for key, value in load_file(path).items()}
    return tensors, json.loads((folder / "trainer.json").read_text())


def same_run(a, b, out_a, out_b):
    """Weights, critic, moments, trainer state and metrics, but for the clock, are equal bit for bit."""
    clockless = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert clockless(a) == clockless(b)
    (left, state), (right, other) = weights(out_a), weights(out_b)
    assert left.keys() == right.keys() and state == other
    assert all(torch.equal(left[key], right[key]) for key in left)


# ------------------------------------------------------------------------------------------------- what a run leaves

COMBINATIONS = [(algo, estimator, ("sokoban", "bandit", "frozenlake")[(i + j) % 3])
                for i, algo in enumerate(("starpo", "starpo-s"))
                for j, estimator in enumerate(("grpo", "gae", "bilevel"))]
COMBINATIONS += [("starpo", "gae", "frozenlake"), ("starpo-s", "bilevel", "bandit"), ("starpo", "grpo", "frozenlake")]


@pytest.mark.parametrize("algo,estimator,env", COMBINATIONS)
def test_a_run_folder(micro, tmp_path, capsys, algo, estimator, env):
    """Every algorithm, estimator and game: the files, their keys, ratio 1 before the first step, weights that moved and
    that plain transformers loads."""
    out = tmp_path / "run"
    limits = ["--max_turns", 1, "--max_actions", 1] if env == "bandit" else []
    rows = run(micro, out, "--algo", algo, "--estimator", estimator, "--env", env, "--iters", 2, "--temperature", 0.9,
               "--format_penalty", 0.5, *limits)
    config = json.loads((out / "config.json").read_text())
    assert set(config) == {field.name for field in dataclasses.fields(Config)}
    assert (config["algo"], config["estimator"], config["env"], config["iters"]) == (algo, estimator, env, 2)
    assert config["clip_ratio_high"] == (0.28 if algo == "starpo-s" else 0.2)
    assert config["kl_coef"] == (0 if algo == "starpo-s" else 0.001) and config["keep"] == 1
    assert [row["iter"] for row in rows] == [1, 2]
    moved = 0
    assert env != "sokoban" or rows[0]["valid_frac"] > 0 and rows[0]["reward_std_in_group"] > 0.1
    for row in rows:
        wanted = ALWAYS | set(["kl_ref"] * (algo == "starpo") + ["explained_variance"] * (estimator != "grpo"))
        assert row["optimizer_steps"] == 1 and wanted <= set(row)
        assert all(isinstance(x, (int, float)) and math.isfinite(x) for x in row.values())
        assert 0 <= row["ratio_max_dev"] < 1e-5 and row["groups_kept"] == 2 and row["tokens"] > 0
        moved += row["grad_norm"] > 0
    assert moved or env == "bandit"             # the micro model knows no arm: equal rewards, nothing to learn
    if algo == "starpo":
        assert rows[0]["kl_ref"] == pytest.approx(0, abs=1e-6) and (rows[1]["kl_ref"] > 1e-9 or env == "bandit")
    summary = json.loads((out / "summary.json").read_text())
    assert SUMMARY <= set(summary) and summary["eval_n"] == 3 and summary["iters"] == 2
    assert 0 <= summary["success_random"] <= 1 and 0 < summary["success_optimal"] <= 1
    policy = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    start = AutoModelForCausalLM.from_pretrained(micro)
    changed = [not torch.equal(a, b) for a, b in zip(policy.parameters(), start.parameters(), strict=True)]
    assert any(changed)
    assert (out / "checkpoint" / "critic.safetensors").exists() == (estimator != "grpo")
    files = {path.suffix for path in out.rglob("*") if path.is_file()}
    assert files <= {".json", ".jsonl", ".txt", ".safetensors", ".jinja", ".png"}
    sample, = (out / "samples").iterdir()
    assert sample.read_text().count("[turn 1:") == 3 and "<think>" in sample.read_text()
    printed = capsys.readouterr().out
    assert "success_optimal" not in printed and "optimal" in printed and str(out) in printed


def test_supervised_runs(micro, tmp_path):
    """--algo sft on several games: the likelihood of the demonstrations rises, everything is valid and careful."""
    rows = run(micro, tmp_path / "sft", "--algo", "sft", "--env", "sokoban,bandit,frozenlake,bandit", "--iters", 6,
               "--lr", 3e-3, "--warmup", 0, "--groups", 2, "--group_size", 4)
    assert rows[0]["nll"] > rows[-1]["nll"] + 0.5
    assert all(row["valid_frac"] == 1 and row["optimizer_steps"] == 1 for row in rows)
    assert (tmp_path / "sft" / "checkpoint" / "model.safetensors").exists()


def test_curves(micro, tmp_path, monkeypatch, capsys):
    """curves.png where matplotlib is there; one line and no more where it is not."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        run(micro, tmp_path / "run", "--iters", 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "matplotlib" in line]
    assert len(lines) == 1 and not (tmp_path / "run" / "curves.png").exists()
    pytest.importorskip("matplotlib")
    plot.draw_run(tmp_path / "run")
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_user_environments_by_path(micro, tmp_path, user):
    rows = run(micro, tmp_path / "run", "--env", f"{user}:Pick", "--iters", 1, "--max_turns", 1, "--max_actions", 1)
    assert len(rows) == 1 and "level" in (tmp_path / "run" / "samples" / "00001.txt").read_text()


def test_nothing_kept_skips_the_step_and_the_run_ends_cleanly(micro, tmp_path):
    """All rewards equal and keep below 1: no step, no NaN, the weights of the start."""
    rows = run(micro, tmp_path / "run", "--keep", 0.5, "--max_new_tokens", 1, "--iters", 2, "--estimator", "gae")
    for row in rows:
        assert row["optimizer_steps"] == row["groups_kept"] == 0 and row["zero_var_frac"] == 1
    policy, start = (AutoModelForCausalLM.from_pretrained(x) for x in (tmp_path / "run" / "checkpoint", micro))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_no_json_is_left_out_of_the_log(micro, tmp_path, monkeypatch, value):
    indicators = train.indicators
    monkeypatch.setattr(train, "indicators", lambda *args: indicators(*args) | {"entropy": value})
    row, = run(micro, tmp_path / "run", "--iters", 1)
    assert "entropy" not in row and row["optimizer_steps"] == 1


def test_the_filter_keeps_a_share_of_the_groups(micro, tmp_path):
    rows = run(micro, tmp_path / "run", "--groups", 5, "--keep", 0.4, "--iters", 2, "--format_penalty", 1,
               "--minibatch_size", 2)
    assert all(row["groups_kept"] == 2 and row["optimizer_steps"] == 3 for row in rows)       # 2 groups of 3, in twos


def test_defaults_tuned_for_a_game_give_way_to_flags_and_other_algorithms():
    """On tiny, StarPO-S keeps half of FrozenLake's groups at a smaller step; every flag, algorithm or model has its own way."""
    tuned = train.resolve(Config(env="frozenlake"))
    assert (tuned.keep, tuned.lr, tuned.clip_ratio_high, tuned.kl_coef) == (0.5, 1e-4, 0.28, 0)
    flagged = train.resolve(Config(env="frozenlake", keep=0.25, lr=3e-4))
    assert (flagged.keep, flagged.lr) == (0.25, 3e-4)
    vanilla = train.resolve(Config(env="frozenlake", algo="starpo"))
    assert (vanilla.keep, vanilla.lr) == (1.0, 3e-4)
    assert train.resolve(Config(env="frozenlake", model="folder")).keep == train.resolve(Config(env="sokoban")).keep == 0.25


def test_the_learning_rate_rises_to_its_value(micro, tmp_path):
    """With a warmup the first step is a small one; Adam's first step is the learning rate, whatever the gradient."""
    start = load_file(f"{micro}/model.safetensors")
    moved = {}
    for warmup in (0, 10):
        run(micro, tmp_path / str(warmup), "--iters", 1, "--warmup", warmup, "--format_penalty", 1, "--lr", 1e-3)
        end = load_file(tmp_path / str(warmup) / "checkpoint" / "model.safetensors")
        moved[warmup] = max((end[key] - start[key]).abs().max().item() for key in start)
    assert moved[0] == pytest.approx(1e-3, rel=0.05) and moved[10] == pytest.approx(1e-4, rel=0.05)


# ------------------------------------------------------------------------------------------------------- resuming

@pytest.mark.parametrize("estimator,env,elsewhere", [("gae", "sokoban", True), ("bilevel", "frozenlake", False)])
def test_n_plus_m_iterations_are_n_then_m(micro, tmp_path, estimator, env, elsewhere):
    """In one go, or stopped after 2 of 3 (on the way, with another cadence of evaluation) and resumed by another
    process: weights, critic, moments, metrics, summary."""
    flags = ["--estimator", estimator, "--env", env, "--algo", "starpo", "--format_penalty", 0.7, "--minibatch_size", 4]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    a = run(micro, whole, *flags, "--iters", 3)
    assert sum(row["grad_norm"] > 0 for row in a) >= 2
    run(micro, parts, *flags, "--iters", 2)
    before = json.loads((parts / "summary.json").read_text())
    again = ["--resume", str(parts), "--iters", "3"]
    if elsewhere:
        subprocess.run([sys.executable, str(ROOT / "train.py"), *again], check=True, capture_output=True, cwd=tmp_path,
                       env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "5"}, timeout=120)
    else:
        train.main(again)
    same_run(a, read(parts), whole, parts)
    assert before["iters"] == 2 and json.loads((parts / "summary.json").read_text())["iters"] == 3


def test_a_resumed_run_still_knows_how_it_began(micro, tmp_path, user):
    """Its "before" is the model that it started from, not the checkpoint that it went on with."""
    flags = ["--env", f"{user}:Pick", "--max_turns", 1, "--max_actions", 1, "--lr", 0.05, "--warmup", 0]
    run(micro, tmp_path / "run", *flags, "--iters", 2)
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    train.main(["--resume", str(tmp_path / "run"), "--iters", "3"])
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {k: v for k, v in after.items() if k.startswith(("success_before", "success_random", "success_optimal"))} \
        == {k: v for k, v in before.items() if k.startswith(("success_before", "success_random", "success_optimal"))}


def test_resuming_from_a_checkpoint_in_the_middle(micro, tmp_path):
    """A run that was killed after more iterations than it saved, in the middle of a line of metrics: rows after the
    checkpoint are played, and logged, again. So also where the kill came between the two renames of a save."""
    flags = ["--format_penalty", 0.7, "--env", "sokoban"]
    whole = tmp_path / "whole"
    a = run(micro, whole, *flags, "--iters", 3)
    for name in ("plain", "renamed"):
        parts = tmp_path / name
        run(micro, parts, *flags, "--iters", 1 if name == "plain" else 2)
        lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
        (parts / "metrics.jsonl").write_text(lines[0] + lines[1] + lines[2][:30])
        if name == "renamed":
            (parts / "checkpoint").rename(parts / "checkpoint.old")
        train.main(["--resume", str(parts), "--iters", "3"])
        same_run(a, read(parts), whole, parts)


def test_how_often_one_evaluates_or_saves_changes_nothing(micro, tmp_path):
    flags = ["--iters", 3, "--format_penalty", 0.7, "--env", "frozenlake", "--estimator", "gae"]
    a = run(micro, tmp_path / "a", *flags)
    b = run(micro, tmp_path / "b", *flags, "--eval_every", 1, "--save_every", 1, "--eval_n", 5)
    evaluated = [row.pop("eval_success") for row in b]
    assert len(evaluated) == 3 and all(0 <= x <= 1 for x in evaluated)
    left, right = weights(tmp_path / "a")[0], weights(tmp_path / "b")[0]
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in a] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in b]


def test_runs_depend_on_their_seed_and_not_on_global_random_state(micro, tmp_path):
    flags = ["--iters", 1, "--format_penalty", 0.7]
    runs = {}
    for name, seed, state in (("a", 0, 0), ("b", 0, 1), ("c", 1, 0)):
        random.seed(state), np.random.seed(state), torch.manual_seed(state)
        runs[name] = run(micro, tmp_path / name, *flags, "--seed", seed)
    same_run(runs["a"], runs["b"], tmp_path / "a", tmp_path / "b")
    left, right = weights(tmp_path / "a")[0], weights(tmp_path / "c")[0]
    assert any(not torch.equal(left[key], right[key]) for key in left)


def test_evaluating_a_run_folder_a_model_folder_and_other_games(micro, tmp_path, capsys):
    run(micro, tmp_path / "run", "--iters", 1)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    found = train.main(["--eval_only", str(tmp_path / "run"), "--eval_envs", "sokoban,sokoban-newvocab,bandit"])
    assert set(found) == {"sokoban", "sokoban-newvocab", "bandit"} and all(0 <= x <= 1 for x in found.values())
    out = capsys.readouterr().out
    assert "random" in out and "optimal" in out
    again = train.main(["--eval-only", str(tmp_path / "run"), "--eval_envs", "sokoban,sokoban-newvocab,bandit"])
    assert again == found                                           # the same levels, luck and streams each time
    assert train.main(["--eval_only", micro, "--env", "bandit", "--eval_n", "4", "--max_new_tokens", "8"])
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["sokoban"] == summary["success_after"]


# ------------------------------------------------------------------------------------------------- levels and luck

def config(**changes):
    return train.resolve(Config(**{"iters": 1, "model": "tiny", "out": "x", **changes}))


def test_training_and_evaluation_levels_are_disjoint_and_luck_is_a_members_own():
    levels = {}
    for seed in range(4):
        cfg = config(seed=seed)
        mine = [train_seed(cfg, i * cfg.groups + group) for i in range(300) for group in range(cfg.groups)]
        assert len(set(mine)) == len(mine)
        levels[seed] = set(mine)
    held_out = {split: set(range(first, first + 4096)) for split, first in train.SPLITS.items()}
    sets = [*levels.values(), *held_out.values()]
    assert sum(map(len, sets)) == len(set().union(*sets))
    luck = [noise_seed(level, member) for level in (0, 1, 2, 10_000_000) for member in range(4096)]
    assert len(set(luck)) == len(luck)
    streams = [sample_seed(config(seed=seed), i) for seed in range(4) for i in range(1000)]
    assert len(set(streams)) == len(streams) and 0 not in streams       # 0: evaluation


def capture(monkeypatch):
    """Record what train.py asks of rollout()."""
    calls = []

    def spy(model, tokenizer, envs, seeds, noise_seeds, group_ids, **options):
        calls.append(SimpleNamespace(seeds=list(seeds), noise=list(noise_seeds), groups=list(group_ids), **options))
        return rollout(model, tokenizer, envs, seeds, noise_seeds, group_ids, **options)

    monkeypatch.setattr(train, "rollout", spy)
    return calls


def test_what_an_iteration_asks_for(micro, tmp_path, monkeypatch):
    """Levels a group, luck a member, a stream an iteration; none of it depends on evaluation in between."""
    calls = capture(monkeypatch)
    run(micro, tmp_path / "a", "--iters", 3, "--eval_every", 1, "--temperature", 0.8, "--no_think")
    del calls[0]                                # the scripted episode that checks whether a prompt fits
    assert {(call.think, call.max_new_tokens) for call in calls} == {(False, 10)}
    training = [call for call in calls if getattr(call, "sample_seed", 0)]
    held_out = [call for call in calls if call not in training]
    assert len(training) == 3 and len(held_out) == 6
    assert len({tuple(call.seeds) for call in held_out}) == len({tuple(call.noise) for call in held_out}) == 1
    assert [call.temperature for call in held_out] == [0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
    assert [call.temperature for call in training] == [0.8] * 3
    assert len({call.sample_seed for call in training}) == 3
    seen = []
    for call in training:
        assert call.seeds == [level for level in dict.fromkeys(call.seeds) for _ in range(3)]
        assert len(set(call.groups)) == 2 and len(set(zip(call.groups, call.seeds))) == 2
        assert len(set(call.noise)) == 6
        seen += sorted(set(call.seeds))
    assert len(set(seen)) == 6 and not set(seen) & set(held_out[0].seeds)


def test_shared_and_independent_luck(micro, monkeypatch):
    """On the bandit, members of a group that pull the same arm: with shared luck they are paid alike, always."""
    calls = capture(monkeypatch)
    tokenizer = train.load_policy(micro, "cpu")[1]
    monkeypatch.setattr(train, "rollout", lambda *args, **options: rollout(
        None, *args[1:], script=lambda env, row: "x</think><answer>Dragon</answer>", max_new_tokens=50))
    paid = {}
    for noise in ("shared", "independent"):
        cfg = config(env="bandit", groups=30, group_size=8, noise=noise, max_new_tokens=50)
        batch = play_groups(cfg, None, tokenizer, 0)
        paid[noise] = batch.rewards.sum(1).reshape(30, 8)
        assert torch.equal(batch.group_ids, torch.arange(30).repeat_interleave(8))
        assert set(paid[noise].unique().tolist()) == {0.0, 1.0}
    assert (paid["shared"] == paid["shared"][:, :1]).all()
    assert (paid["independent"] != paid["independent"][:, :1]).any(1).float().mean() > 0.6
    assert abs(paid["independent"].mean() - 0.25) < 0.12 and not calls


# ------------------------------------------------------------------------------------------------------- the flags

def test_flags_are_the_fields_and_dashes_are_underscores():
    given = train.parse_flags("--env bandit --env_args low_reward=0.35 --max-new-tokens 7 --clip-ratio-high=0.3 "
                              "--no-think --no_normalize_std --token-mean --lr 1e-4 --noise shared".split())
    assert given == dict(env="bandit", env_args="low_reward=0.35", max_new_tokens=7, clip_ratio_high=0.3, think=False,
                         normalize_std=False, token_mean=True, lr=1e-4, noise="shared")
    for words in (["--no_think"], ["--no-think"], ["--think", "--no_think"]):
        assert train.parse_flags(words) == {"think": False}
    for field in dataclasses.fields(Config):
        value = {bool: [], int: ["3"], float: ["0.5"], str: ["x"]}[field.type]
        for name in (field.name, field.name.replace("_", "-")):
            assert train.parse_flags([f"--{name}", *value]) == {field.name: field.type(*value) if value else True}


def test_every_flag_of_the_design_is_there():
    names = set("""env env_args model algo estimator groups group_size iters epochs minibatch_size lr critic_lr gamma
        lam keep clip_ratio_low clip_ratio_high kl_coef format_penalty normalize_std entropy_coef temperature
        max_new_tokens max_turns max_actions_per_turn max_actions think noise seed out resume eval_only eval_envs eval_n eval_every save_every
        tokens_per_micro_batch device dtype threads""".split())
    assert names <= {field.name for field in dataclasses.fields(Config)}


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{field.name}" in out for field in dataclasses.fields(Config) if field.type is not bool)


def test_the_switches_of_an_algorithm_can_be_set_alone():
    for algo, switches in (("starpo", (1, 0.001, 0.2)), ("starpo-s", (0.25, 0, 0.28))):
        cfg = config(algo=algo)
        assert (cfg.keep, cfg.kl_coef, cfg.clip_ratio_high) == switches
    changed = config(algo="starpo-s", keep=0.5, kl_coef=0.0, clip_ratio_high=0.4)
    assert (changed.keep, changed.kl_coef, changed.clip_ratio_high) == (0.5, 0, 0.4)
    assert config(lr=5e-5).lr == 5e-5 and config(lr=5e-5).critic_lr == pytest.approx(5e-4)
    assert config(model="some/model").lr < config().lr


@pytest.mark.parametrize("text,found", [
    ("low_reward=0.35", {"low_reward": 0.35}), ("", {}),
    ("arms=('A','B'),low_reward=-1", {"arms": ("A", "B"), "low_reward": -1}),
    ("size=7,symbols='W.GCBA@'", {"size": 7, "symbols": "W.GCBA@"}), (" frozen = 0.5 ", {"frozen": 0.5})])
def test_env_args(text, found):
    assert train.parse_overrides(text) == found


def test_env_args_reach_the_game_and_its_prompt():
    env = train.make(config(env="bandit", env_args="low_reward=0.35"))
    env.reset(0)
    assert env.low_reward == 0.35 and env.solve() == ["Phoenix"]
    cfg = config(env="sokoban", max_turns=3, max_actions=7, max_actions_per_turn=2)
    env = train.make(cfg)
    env.reset(0)
    assert (env.max_turns, env.max_actions, env.max_actions_per_turn) == (3, 7, 2)
    assert "turns 3" in env.instruction and "actions in all 7" in env.instruction
    other = train.make(config(env="bandit", env_args="low_reward=0.35"), "sokoban")     # not this game's overrides
    assert type(other).__name__ == "Sokoban"


BAD = [     # flags, and what the one line must say
    ("--env nowhere", "nowhere sokoban bandit"),
    ("--env nothing.py:Game", "nothing.py"),
    ("--grups 3", "--grups --groups"),
    ("--max_new_token 3", "--max_new_token --max_new_tokens"),
    ("--estimater grpo", "--estimater --estimator"),
    ("--nothink", "--nothink"),
    ("--model no/where/at/all", "--model no/where/at/all"),
    ("--group_size 1 --estimator grpo", "--group_size 1 2"),
    ("--group_size 1 --estimator gae --keep 0.5", "--group_size 1 2"),
    ("--temperature 0", "--temperature 0"),
    ("--temperature -1", "--temperature -1"),
    ("--clip_ratio_low 0.5 --clip_ratio_high 0.2", "--clip_ratio_low 0.5 0.2"),
    ("--clip_ratio_low 1.5 --clip_ratio_high 2", "--clip_ratio_low 1.5"),
    ("--keep 0", "--keep 0"),
    ("--keep 1.5", "--keep 1.5"),
    ("--keep nan", "--keep nan"),
    ("--lr nan", "--lr nan"),
    ("--lr 0", "--lr 0"),
    ("--lr fast", "--lr fast"),
    ("--groups 0", "--groups 0"),
    ("--groups 2.5", "--groups 2.5"),
    ("--iters 0", "--iters 0"),
    ("--seed -1", "--seed -1"),
    ("--epochs 0", "--epochs 0"),
    ("--gamma 1.2", "--gamma 1.2"),
    ("--algo ppo", "--algo ppo starpo starpo-s sft"),
    ("--estimator reinforce", "--estimator reinforce grpo gae bilevel"),
    ("--noise none", "--noise none independent shared"),
    ("--dtype int8", "--dtype int8 float32"),
    ("--env_args size", "--env_args size"),
    ("--env_args size=", "--env_args size="),
    ("--env_args size=99", "size 99"),
    ("--env_args height=3", "height size"),
    ("--env bandit --env_args arms=('A','A')", "arms"),
    ("--env_args __import__('os')", "--env_args"),
    ("--env_args a=1)+dict(b=2", "--env_args name=value"),
    ("--env bandit --env_args arms=('a','A')", "arms"),
    ("--env bandit --env_args arms=('','b')", "arms"),
    ("--seed 300000000", "--seed 300000000 200000000"),
    ("--max_turns 0", "--max_turns 0"),
    ("--resume nowhere", "--resume nowhere"),
    ("--eval_only nowhere", "nowhere"),
    ("--eval_envs sokoban,nowhere", "nowhere"),
    ("--env {user}:NoStep", "NoStep step"),
    ("--env {user}:BadReset", "BadReset reset"),
    ("--env {user}:Nobody", "Nobody"),
    ("--env {user}:OldStep", "OldStep step"),
    ("--env {user}:KeywordSeed", "KeywordSeed"),
    ("--env sokoban,bandit", "--env sokoban,bandit sft"),
    ("--env sokoban,bandit --algo sft --env_args size=7", "--env sokoban,bandit --env_args"),
    ("--out {run}", "--out --resume"),
    ("--resume {run} --lr 0.5", "--lr 0.5 0.001"),
    ("--resume {run} --env bandit --iters 9", "--env bandit sokoban"),
    ("--resume {run} --no_think", "--think False"),
    ("--iters", "--iters"),
    ("sokoban", "sokoban"),
    ("--max_new_tokens 100000", "--max_new_tokens 100000 2048"),
    ("--device nonsense", "--device nonsense"),
    ("--device cuda:77", "--device cuda:77"),
    ("--out {run}/config.json", "--out config.json"),
    ("--model {bare}", "--model template"),
]


@pytest.fixture(scope="module")
def places(micro, tok, tmp_path_factory):
    """A finished run, a user's file, a model without a chat template."""
    path = tmp_path_factory.mktemp("places")
    run(micro, path / "run", "--iters", 1, "--env", "sokoban")
    (path / "pick.py").write_text(PICK)
    shutil.copytree(micro, path / "bare")
    (path / "bare" / "chat_template.jinja").unlink()
    return dict(run=path / "run", user=path / "pick.py", bare=path / "bare")


@pytest.mark.parametrize("flags,words", [
    pytest.param(flags, words, id=flags) for flags, words in BAD])
def test_bad_input_is_one_line_and_leaves_nothing_behind(micro, places, tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    argv = [word.format(**places) for word in flags.split()]
    known = {path: path.read_bytes() for path in places["run"].rglob("*") if path.is_file()}
    if not {"--resume", "--eval_only", "--model"} & set(argv):
        argv = ["--model", micro, "--eval_n", "2", *argv]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.endswith("\n") and len(err) < 600, err
    assert all(word in err for word in words.split()), err
    assert "Traceback" not in err and not list(tmp_path.iterdir())
    assert {path: path.read_bytes() for path in places["run"].rglob("*") if path.is_file()} == known


def test_resuming_with_the_same_or_changeable_flags_is_fine(micro, tmp_path):
    run(micro, tmp_path / "run", "--iters", 1)
    same = "--iters 2 --groups 2 --eval_every 1 --save-every 1".split()
    train.main(["--resume", str(tmp_path / "run"), *same])
    assert [row["iter"] for row in read(tmp_path / "run")] == [1, 2]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["iters"] == 2 and saved["out"] == str(tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    train.main(["--resume", str(tmp_path / "moved"), "--iters", "3"])
    assert len(read(tmp_path / "moved")) == 3 and not (tmp_path / "run").exists()


def test_default_folders_never_overwrite_a_run(micro, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train.main(["--model", micro, *QUICK, "--iters", "1", "--env", "bandit", "--max_actions", "1"])
    assert len(list((tmp_path / "runs").glob("*/metrics.jsonl"))) == 2


# ------------------------------------------------------------------------------------------------------- learning

@pytest.mark.skipif(not (TINY / "config.json").exists(), reason="tiny/ has not been built (python model.py --rebuild)")
def test_it_learns(tmp_path, user):
    """A word that pays, which the tiny model says now and then: after a few iterations it says it nearly always."""
    train.main(f"--env {user}:Pick --groups 4 --group_size 8 --iters 8 --lr 1e-3 --warmup 0 --keep 1 --eval_n 16 "
               f"--eval_every 0 --max_new_tokens 48 --threads 1 --device cpu --out {tmp_path / 'run'}".split())
    rewards = [row["reward_mean"] for row in read(tmp_path / "run")]
    assert rewards[0] < 0.6 and sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["success_after"] > summary["success_before"] + 0.25, summary


def test_doctests():
    assert doctest.testmod(train).failed == 0


def test_another_game_is_evaluated_when_it_is_named(micro, tmp_path):
    """--eval_only RUN --env OTHER plays OTHER, not the game of the run."""
    run(micro, tmp_path / "run", "--iters", 1, "--env", "bandit")
    assert list(train.main(["--eval_only", str(tmp_path / "run"), "--env", "sokoban", "--eval_n", "2"])) == ["sokoban"]
    assert list(train.main(["--eval_only", str(tmp_path / "run"), "--eval_n", "2"])) == ["bandit"]


def test_a_critic_learns_at_ten_times_the_policys_rate(tmp_path):
    """Also where the environment has a learning rate of its own."""
    for words in ([], ["--env", "frozenlake"], ["--env", "frozenlake", "--lr", "1e-3"], ["--algo", "sft"]):
        cfg = train.configure([*words, "--estimator", "gae", "--out", str(tmp_path / "run")])
        assert cfg.critic_lr == pytest.approx(10 * cfg.lr)


def test_supervised_dialogues_stay_within_the_context(tok, tmp_path):
    """GPT-2 has a table of positions: an id behind its end is an error."""
    folder = tmp_path / "small"
    policy = micro_gpt2(tok)
    policy.config.n_positions = 300
    policy.transformer.wpe.weight.data = policy.transformer.wpe.weight.data[:300]
    policy.save_pretrained(folder)
    tok.save_pretrained(folder)
    run(str(folder), tmp_path / "run", "--iters", 1, "--env", "sokoban", "--algo", "sft", "--max_turns", 4,
        "--max_actions_per_turn", 1)
    assert read(tmp_path / "run")[0]["context_cut_frac"] > 0
