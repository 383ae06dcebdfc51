"""Train a language-model agent with StarPO: roll out, filter, advantages, update, again.

    python train.py --env sokoban                     # StarPO-S on the built-in tiny model: minutes on a laptop CPU
    python train.py --env bandit --algo starpo        # the vanilla algorithm: KL, symmetric clipping, no filter
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --env sokoban --device cuda

StarPO treats a whole dialogue (thoughts, answers, observations) as one trajectory. An iteration samples `groups` levels,
plays each `group_size` times, and takes policy-gradient steps on the tokens that were sampled. StarPO-S keeps only the
quarter of the groups whose rewards vary most, drops the KL term, and clips upward moves later than downward ones.

Differences from RAGEN: levels and luck have separate seeds, observations carry no gradient, and every success rate
stands between a random valid policy and the best possible one (README, "same / different / left out").

In reading order: Config, train (the loop), supervised (--algo sft), evaluate, the seeds, the report, the command line.
"""
import argparse
import dataclasses
import difflib
import json
import math
import random
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from envs import make_env, random_success
from model import Critic, find_checkpoint, load_policy, load_trainer, save_checkpoint
from rollout import Trajectories, rollout
from starpo import (compute_advantages, episode_rewards, filter_groups, indicators, loss_weights, step_or_skip, token_logprobs,
                    token_values, update)


def option(default, help: str):
    """A Config field: its default, and a help text with unit and usual range."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Everything a run depends on. One command-line flag a field; the resolved values are printed and saved. None means
    "by algorithm, model or environment": see ALGORITHMS and resolve()."""
    env: str = option("sokoban", "bandit, sokoban, frozenlake, a variant of them, or path/to/file.py:Class")
    env_args: str = option("", "overrides of the environment, as in low_reward=0.35,max_turns=3")
    model: str = option("tiny", "tiny (built in), a local folder, or a hub id")
    algo: str = option("starpo-s", "starpo (KL, clip 0.2/0.2, all groups), starpo-s (no KL, 0.2/0.28, top quarter), or sft")
    estimator: str = option("grpo", "grpo (group baseline), gae (critic), or bilevel (critic, turns then tokens)")
    groups: int = option(8, "levels an iteration, P (usual 4..32)")
    group_size: int = option(16, "episodes a level, N (usual 4..32)")
    iters: int = option(None, "iterations")
    epochs: int = option(1, "passes over the kept trajectories (1: nearly on-policy; 2..4 reuses them)")
    minibatch_size: int = option(32, "trajectories an optimizer step")
    lr: float = option(None, "policy learning rate (tiny 1e-4; a pretrained 0.5 B model 1e-6)")
    critic_lr: float = option(None, "critic learning rate (usual 10 x lr)")
    gamma: float = option(1.0, "discount a token")
    lam: float = option(1.0, "GAE lambda a token")
    gamma_turn: float = option(0.95, "discount a turn (bilevel)")
    lam_turn: float = option(1.0, "GAE lambda a turn (bilevel)")
    keep: float = option(None, "share of groups kept, those whose rewards vary most (1 keeps all)")
    clip_ratio_low: float = option(0.2, "the ratio may fall to 1 - this")
    clip_ratio_high: float = option(None, "the ratio may rise to 1 + this (0.28 in StarPO-S)")
    value_clip: float = option(None, "clip of value changes; none by default, returns near 11 would throttle the critic")
    kl_coef: float = option(None, "weight of the KL to the start (0.001 in StarPO): in the reward with a critic, else in the loss")
    format_penalty: float = option(0.1, "taken from the reward of a turn without a valid action")
    normalize_std: bool = option(True, "divide GRPO advantages by the group's standard deviation")
    entropy_coef: float = option(0.0, "weight of the entropy bonus (0.001 in the paper)")
    token_mean: bool = option(False, "average the loss over tokens instead of over trajectories")
    max_grad_norm: float = option(1.0, "gradients are clipped to this L2 norm")
    temperature: float = option(1.0, "sampling temperature of training, > 0")
    eval_temperature: float = option(0.5, "sampling temperature of evaluation (0: greedy)")
    max_new_tokens: int = option(None, "longest reply, tokens (tiny 80, else 200)")
    max_turns: int = option(None, "turns an episode (the environment's own: 5)")
    max_actions_per_turn: int = option(None, "actions a turn (the environment's own: 5)")
    max_actions: int = option(None, "actions an episode (the environment's own: 10)")
    think: bool = option(True, "thoughts before answers")
    noise: str = option("independent", "luck of a group's members: independent, or shared as in RAGEN")
    careful: float = option(1.0, "sft: share of dialogues that the solver plays carefully; the others play at random")
    seed: int = option(0, "all seeds are counted from this one")
    out: str = option(None, "run folder (runs/ENV-ALGO-SEED)")
    resume: str = option(None, "run folder to go on with")
    eval_only: str = option(None, "run folder, model folder or tiny: evaluate it and stop")
    eval_envs: str = option(None, "environments to evaluate on, as in sokoban,sokoban-large")
    eval_n: int = option(1024, "held-out levels before and after (95 % interval about +-3 points)")
    eval_split: str = option("test", "test, or tune: other held-out levels, for choosing hyperparameters")
    eval_every: int = option(20, "iterations between evaluations on the first 256 of the levels (0: never)")
    save_every: int = option(50, "iterations between checkpoints (0: only at the end)")
    tokens_per_micro_batch: int = option(8192, "tokens a forward and backward pass; memory grows with it")
    device: str = option("auto", "auto (cuda, mps, cpu) or a torch device")
    dtype: str = option("auto", "of the forward pass: auto, float32, bfloat16")
    threads: int = option(0, "CPU threads (0: torch's choice)")


ALGORITHMS = {
    "starpo": dict(keep=1.0, clip_ratio_high=0.2, kl_coef=0.001),
    "starpo-s": dict(keep=0.25, clip_ratio_high=0.28, kl_coef=0.0),
    "sft": dict(keep=1.0, clip_ratio_high=0.2, kl_coef=0.0),
}


# -------------------------------------------------------------------------------------------------------- the algorithm

def train(cfg: Config, model, tokenizer, critic, reference) -> dict:
    """StarPO: each iteration is rollout, filter, advantages, update. Writes the run folder; returns its summary."""
    run, clock = Run(cfg), Clock()
    optimizers = {"policy": torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.0)}
    if critic is not None:
        optimizers["critic"] = torch.optim.AdamW(critic.parameters(), lr=cfg.critic_lr, weight_decay=0.0)
    start = run.restore(model, critic, optimizers) if cfg.resume else 0
    with clock("evaluation"):
        before = run.first_evaluation(model, tokenizer)

    for iteration in range(start, cfg.iters):
        began = time.perf_counter()
        with clock("rollout"):
            batch = play_groups(cfg, model, tokenizer, iteration)
        clock.shift("rollout", "environment", sum(info["env_seconds"] for info in batch.infos))

        with clock("update"):
            returns = episode_rewards(batch.rewards, batch.penalties)                            # (B,)
            keep = filter_groups(returns, batch.group_ids, cfg.keep)                             # (B,) bool
            metrics = indicators(batch, returns) | {"groups_kept": batch.group_ids[keep].unique().numel()}
            kept, metrics["optimizer_steps"] = batch.select(keep), 0
            if len(kept):
                ref_logprobs = score(cfg, reference, tokenizer, kept) if reference else None     # (B, T)
                values = token_values(critic, kept.tokens, kept.loss_mask, kept.group_ids) if critic else None
                advantages, targets = compute_advantages(
                    cfg.estimator, kept, values, ref_logprobs, kl_coef=cfg.kl_coef, normalize_std=cfg.normalize_std,
                    gamma=cfg.gamma, lam=cfg.lam, gamma_turn=cfg.gamma_turn, lam_turn=cfg.lam_turn)
                metrics |= update(
                    model, optimizers["policy"], kept, advantages, ref_logprobs=ref_logprobs, critic=critic,
                    critic_optimizer=optimizers.get("critic"), old_values=values, returns=targets, epochs=cfg.epochs,
                    minibatch_size=cfg.minibatch_size, tokens_per_micro_batch=cfg.tokens_per_micro_batch,
                    clip_ratio_low=cfg.clip_ratio_low, clip_ratio_high=cfg.clip_ratio_high, value_clip=cfg.value_clip,
                    kl_coef=cfg.kl_coef, kl_in_loss=critic is None, entropy_coef=cfg.entropy_coef, token_mean=cfg.token_mean,
                    temperature=cfg.temperature, vocab_size=len(tokenizer), max_grad_norm=cfg.max_grad_norm,
                    shuffle_seed=sample_seed(cfg, iteration))

        if cfg.eval_every and (iteration + 1) % cfg.eval_every == 0 and iteration + 1 < cfg.iters:
            with clock("evaluation"):
                quick = evaluate(cfg, model, tokenizer, min(cfg.eval_n, 256), cfg.eval_temperature)
                metrics["eval_success"] = success_of(quick).mean().item()
        run.log(iteration, metrics, time.perf_counter() - began, batch)
        if cfg.save_every and (iteration + 1) % cfg.save_every == 0:
            run.save(iteration + 1, model, tokenizer, critic, optimizers)

    run.save(cfg.iters, model, tokenizer, critic, optimizers)
    with clock("evaluation"):
        after = evaluate(cfg, model, tokenizer, cfg.eval_n, cfg.eval_temperature)
    return run.report(before, after, clock)


def play_groups(cfg: Config, model, tokenizer, iteration: int) -> Trajectories:
    """One iteration's rollouts: `groups` levels, each played `group_size` times with luck of its own."""
    levels = level_seeds(cfg, iteration)
    rows = [(group, level, member) for group, level in enumerate(levels) for member in range(cfg.group_size)]
    seeds = [level for _, level, _ in rows]
    noise_seeds = [noise_seed(level, member if cfg.noise == "independent" else 0) for _, level, member in rows]
    with tqdm(total=len(rows), desc=f"rollout {iteration + 1}", leave=False, disable=None) as bar:
        return rollout(model, tokenizer, [make(cfg) for _ in rows], seeds, noise_seeds, [group for group, _, _ in rows],
                       temperature=cfg.temperature, max_new_tokens=cfg.max_new_tokens, think=cfg.think,
                       sample_seed=sample_seed(cfg, iteration), format_penalty=cfg.format_penalty,
                       progress=lambda finished: bar.update(finished - bar.n))


def score(cfg: Config, model, tokenizer, batch: Trajectories) -> torch.Tensor:
    """Log-probabilities (B, T) of a batch's sampled tokens under another model, without gradient."""
    with torch.no_grad():
        return token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids, cfg.temperature,
                              vocab_size=len(tokenizer))[0]


def supervised(cfg: Config, model, tokenizer) -> dict:
    """--algo sft: raise the likelihood of dialogues that the environments' solvers play, on the same tokens and mask as the
    policy gradient. Every dialogue is a new level; a share `careful` of the dialogues reasons and acts by the solver, the
    others have a hunch and act at random. `--env a,b,b` draws from several environments. Returns the summary."""
    run, clock = Run(cfg), Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    start = run.restore(model, None, {"policy": optimizer}) if cfg.resume else 0
    with clock("evaluation"):
        before = run.first_evaluation(model, tokenizer)
    names = sorted(cfg.env.split(","))
    for iteration in range(start, cfg.iters):
        began = time.perf_counter()
        with clock("rollout"):
            batch = demonstrations(cfg, tokenizer, names, iteration)
        with clock("update"):
            for slot in optimizer.param_groups:
                slot["lr"] = cfg.lr * min(1.0, (iteration + 1) / 20)
            total, tokens = 0.0, max(1, int(batch.loss_mask.sum()))
            weights = loss_weights(batch.loss_mask, token_mean=True).to(model.device)
            for rows in torch.arange(len(batch)).split(cfg.minibatch_size):
                logprobs, _ = token_logprobs(model, batch.tokens[rows], batch.loss_mask[rows], batch.group_ids[rows])
                loss = -(weights[rows] * logprobs).sum()
                loss.backward()
                total += loss.item()
            norm, stepped = step_or_skip(optimizer, cfg.max_grad_norm)
        metrics = {"loss": total, "grad_norm": norm, "tokens": tokens, "success": batch.success.float().mean().item(),
                   "optimizer_steps": int(stepped)}
        run.log(iteration, metrics, time.perf_counter() - began, batch)
        if cfg.save_every and (iteration + 1) % cfg.save_every == 0:
            run.save(iteration + 1, model, tokenizer, None, {"policy": optimizer})
    run.save(cfg.iters, model, tokenizer, None, {"policy": optimizer})
    with clock("evaluation"):
        after = evaluate(cfg, model, tokenizer, cfg.eval_n, cfg.eval_temperature)
    return run.report(before, after, clock)


def demonstrations(cfg: Config, tokenizer, names: list[str], iteration: int) -> Trajectories:
    """groups x group_size scripted dialogues, grouped by environment: their prompts begin alike, which packing shares."""
    count = cfg.groups * cfg.group_size
    seeds = [TRAIN_SEEDS * (1 + cfg.seed) + iteration * count + i for i in range(count)]
    dice = [random.Random(2 * seed) for seed in seeds]
    careful = [rng.random() < cfg.careful for rng in dice]
    which = sorted(seed % len(names) for seed in seeds)
    return rollout(None, tokenizer, [make(cfg, names[i]) for i in which], seeds, [noise_seed(s, 0) for s in seeds],
                   [names.index(names[i]) for i in which], max_new_tokens=1000, think=cfg.think,
                   script=lambda env, row: env.demonstrate(dice[row], careful[row], cfg.think))


# ----------------------------------------------------------------------------------------------------- levels and seeds

TRAIN_SEEDS, SPLITS = 10_000_000, {"test": 0, "tune": 5_000_000}     # training levels, and the two evaluation sets


def level_seeds(cfg: Config, iteration: int) -> list[int]:
    """The seeds of an iteration's levels: counted up, so that none comes twice, and above all evaluation seeds."""
    first = TRAIN_SEEDS * (1 + cfg.seed) + iteration * cfg.groups
    return list(range(first, first + cfg.groups))


def noise_seed(level: int, member: int) -> int:
    """The seed of one episode's luck (slips, payouts)."""
    return level * 4096 + member


def sample_seed(cfg: Config, iteration: int) -> int:
    """Which streams of uniforms the rows of an iteration sample from."""
    return (1 + cfg.seed) * 1_000_000 + iteration


def make(cfg: Config, name: str | None = None):
    """An environment with the run's limits, and its overrides where it is the run's own environment."""
    limits = {k: getattr(cfg, k) for k in ("max_turns", "max_actions_per_turn", "max_actions") if getattr(cfg, k) is not None}
    return make_env(name or cfg.env, **limits, **(parse_overrides(cfg.env_args) if name in (None, cfg.env) else {}))


# ----------------------------------------------------------------------------------------------------------- evaluation

def evaluate(cfg: Config, model, tokenizer, n: int, temperature: float, name: str | None = None) -> list[Trajectories]:
    """Play n held-out levels once each, in batches; the same levels, luck and streams whenever it is called."""
    batches, step = [], 128
    with tqdm(total=n, desc="evaluation", leave=False, disable=None) as bar:
        for first in range(0, n, step):
            seeds = [SPLITS[cfg.eval_split] + i for i in range(first, min(first + step, n))]
            batches.append(rollout(model, tokenizer, [make(cfg, name) for _ in seeds], seeds,
                                   [noise_seed(seed, 0) for seed in seeds], seeds, temperature=temperature,
                                   max_new_tokens=cfg.max_new_tokens, think=cfg.think, format_penalty=cfg.format_penalty))
            bar.update(len(seeds))
    return batches


def success_of(batches: list[Trajectories]) -> torch.Tensor:
    """(n,) float: 1 where an episode succeeded."""
    return torch.cat([batch.success for batch in batches]).double().cpu()


def interval(x: torch.Tensor) -> str:
    """"0.412 +- 0.030": mean and the half width of its 95 % interval (normal approximation)."""
    return f"{x.mean():.3f} +- {1.96 * x.std(correction=0) / math.sqrt(len(x)):.3f}"


def baselines(cfg: Config, name: str | None = None) -> tuple[float | None, float | None]:
    """(success of uniform valid actions over the whole budget, upper bound of any policy) on the evaluation levels."""
    env, chance, best = make(cfg, name), [], []
    for seed in range(SPLITS[cfg.eval_split], SPLITS[cfg.eval_split] + cfg.eval_n):
        chance.append(random_success(env, seed))
        env.reset(seed)
        best.append(env.optimal_success())
    return tuple(None if None in x else sum(x) / len(x) for x in (chance, best))


# ----------------------------------------------------------------------------------------------------------- the report

class Clock(dict):
    """Seconds by what they were spent on: `with clock("rollout"): ...`."""

    @contextmanager
    def __call__(self, name: str):
        began = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - began

    def shift(self, source: str, target: str, seconds: float) -> None:
        """Book `seconds` of `source` on `target`."""
        self[source], self[target] = self[source] - seconds, self.get(target, 0.0) + seconds


class Run:
    """A run folder: config.json, metrics.jsonl, samples/, checkpoint/, summary.json, curves.png."""

    def __init__(self, cfg: Config):
        self.cfg, self.folder, self.began = cfg, Path(cfg.out), time.perf_counter()
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), indent=1))
        self.rows, self.first = [], {}

    def first_evaluation(self, model, tokenizer) -> list[Trajectories]:
        """Success before training, at the evaluation temperature and greedy, between random and optimal play."""
        cfg = self.cfg
        self.first["success_random"], self.first["success_optimal"] = baselines(cfg)
        before = evaluate(cfg, model, tokenizer, cfg.eval_n, cfg.eval_temperature)
        greedy = success_of(evaluate(cfg, model, tokenizer, cfg.eval_n, 0.0))
        self.first |= {"success_before": success_of(before).mean().item(), "success_before_greedy": greedy.mean().item()}
        print(f"start: success {interval(success_of(before))} at temperature {cfg.eval_temperature}, greedy {interval(greedy)}, "
              f"random {show(self.first['success_random'])}, optimal {show(self.first['success_optimal'])}  "
              f"({cfg.eval_n} held-out levels)")
        return before

    def log(self, iteration: int, metrics: dict, seconds: float, batch: Trajectories) -> None:
        """One line of metrics.jsonl and one on the screen; now and then the dialogues of a group as text."""
        row = {"iter": iteration + 1} | metrics | {"seconds": round(seconds, 3)}
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if iteration == 0 or (iteration + 1) % 10 == 0:
            text = ("\n" + "=" * 80 + "\n").join(batch.texts[:self.cfg.group_size])
            (self.folder / "samples" / f"{iteration + 1:05d}.txt").write_text(text)
        columns = [("success", "success"), ("reward", "reward_mean"), ("std", "reward_std_in_group"), ("kept", "groups_kept"),
                   ("entropy", "entropy"), ("valid", "valid_frac"), ("len", "reply_len"), ("grad", "grad_norm"),
                   ("loss", "loss"), ("eval", "eval_success")]
        cells = "  ".join(f"{label} {row[key]:6.3f}" for label, key in columns if row.get(key) is not None)
        tqdm.write(f"{iteration + 1:4d}/{self.cfg.iters}  {cells}  {seconds:5.1f} s")

    def save(self, iteration: int, model, tokenizer, critic, optimizers: dict) -> None:
        """Checkpoint after `iteration` iterations; a broken model is reported and leaves the last good checkpoint."""
        save_checkpoint(self.folder / "checkpoint", model, tokenizer, critic, optimizers,
                        {"iteration": iteration} | self.first)

    def restore(self, model, critic, optimizers: dict) -> int:
        """Take up the saved state (the weights were loaded from the same folder); returns the iteration to go on from."""
        state = load_trainer(self.folder / "checkpoint", critic, optimizers)
        iteration = state.pop("iteration")
        self.first = state
        log = self.folder / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        log.write_text("".join(line for line in lines if json.loads(line)["iter"] <= iteration))
        return iteration

    def report(self, before: list[Trajectories], after: list[Trajectories], clock: Clock) -> dict:
        """The closing table, two dialogues of one level, summary.json and curves.png."""
        cfg, start, end = self.cfg, success_of(before), success_of(after)
        gain = end - start                          # level by level: the same levels and luck before and after
        rows = [("random policy", show(self.first["success_random"])),
                ("before, greedy", show(self.first["success_before_greedy"])),
                (f"before, temperature {cfg.eval_temperature}", interval(start)),
                (f"after, temperature {cfg.eval_temperature}", interval(end)),
                ("gain", interval(gain)), ("optimal policy", show(self.first["success_optimal"]))]
        summary = self.first | {
            "success_after": end.mean().item(), "gain": gain.mean().item(),
            "gain_ci95": 1.96 * gain.std(correction=0).item() / math.sqrt(len(gain)), "eval_n": cfg.eval_n, "iters": cfg.iters,
            "seconds": round(time.perf_counter() - self.began, 1), "time": {k: round(v, 1) for k, v in clock.items()}}
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        level = next((i for i in range(len(gain)) if gain[i] > 0), 0)
        for title, batches in (("BEFORE", before), ("AFTER", after)):
            texts = [text for batch in batches for text in batch.texts]
            print(f"\n----- {title} (held-out level {level}) -----\n{texts[level]}")
        print(f"success on {cfg.eval_n} held-out levels of {cfg.env}, 95 % interval")
        print("\n".join(f"  {name:24s} {value}" for name, value in rows))
        print("time: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in clock.items()))
        draw_curves(self.folder, summary)
        print(f"run folder: {self.folder}   (evaluate again: python train.py --eval_only {self.folder})")
        return summary


def show(x: float | None) -> str:
    """A success rate, or a dash where it is not known."""
    return "-" if x is None else f"{x:.3f}"


def draw_curves(folder: Path, summary: dict) -> None:
    """curves.png from metrics.jsonl, where matplotlib is installed."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("curves.png: skipped, matplotlib is not installed (pip install matplotlib)")
        return
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    panels = [("success", "success"), ("reward_std_in_group", "reward std in group"), ("entropy", "entropy (nats a token)"),
              ("grad_norm_max", "largest gradient norm")]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained")
    for axis, (key, title) in zip(axes, panels):
        points = [(row["iter"], row[key]) for row in rows if row.get(key) is not None]
        axis.plot(*zip(*points), color="tab:blue", linewidth=1, label="training rollouts") if points else None
        axis.set(title=title, xlabel="iteration")
    evaluated = [(row["iter"], row["eval_success"]) for row in rows if row.get("eval_success") is not None]
    evaluated = [(0, summary["success_before"]), *evaluated, (summary["iters"], summary["success_after"])]
    axes[0].plot(*zip(*evaluated), "o-", color="tab:orange", label="held-out levels")
    for key, style in (("success_random", ":"), ("success_optimal", "--")):
        if summary.get(key) is not None:
            axes[0].axhline(summary[key], color="gray", linestyle=style, label=key.removeprefix("success_"))
    axes[0].set_ylim(0, 1.05)
    axes[0].legend(fontsize=8)
    figure.savefig(folder / "curves.png", dpi=120)
    pyplot.close(figure)


def evaluate_only(cfg: Config, model, tokenizer) -> None:
    """--eval_only: success on the held-out levels of each environment in --eval_envs, between random and optimal."""
    for name in (cfg.eval_envs or cfg.env).split(","):
        batches = evaluate(cfg, model, tokenizer, cfg.eval_n, cfg.eval_temperature, name)
        chance, best = baselines(cfg, name)
        valid = [turn["valid"] for batch in batches for info in batch.infos for turn in info["turns"]]
        print(f"{name:20s} success {interval(success_of(batches))}   random {show(chance)}   optimal {show(best)}   "
              f"valid replies {sum(valid) / max(1, len(valid)):.3f}   ({cfg.eval_n} levels)")
        if name == cfg.env:
            print(f"\n{batches[0].texts[0]}")


# ----------------------------------------------------------------------------------------------------- the command line

CHANGEABLE = {"iters", "eval_every", "save_every", "device", "threads", "resume"}     # what a resumed run may change


def parse_overrides(text: str) -> dict:
    """"low_reward=0.35,arms=A+B" -> {"low_reward": 0.35, "arms": ("A", "B")}; numbers where they read as numbers."""
    overrides = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--env_args {text}: expected name=value,name=value")
        overrides[name.strip()] = tuple(value.split("+")) if "+" in value else number(value)
    return overrides


def number(text: str):
    """int, float or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class Parser(argparse.ArgumentParser):
    """argparse with one line instead of a usage page."""

    def error(self, message):
        self.exit(2, f"train.py: {message}\n")


def parse_flags(argv: list[str]) -> dict:
    """The flags that were given, as a dict; a misspelt one ends with the nearest name."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Config):
        kind = {"int": int, "float": float, "str": str, "bool": None}[field.type.__name__]
        text = f"{field.metadata['help']} [{field.default}]".replace("%", "%%")
        how = dict(action=argparse.BooleanOptionalAction) if kind is None else dict(type=kind, metavar=kind.__name__)
        parser.add_argument(f"--{field.name}", help=text, **how)
    words = []
    for word in argv:                               # --no_think, --eval-only=DIR: dashes and underscores are alike
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
            name = name.replace("--no_", "--no-", 1)
        words.append(name + equals + value)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        names = [f"--{field.name}" for field in dataclasses.fields(Config)]
        near = difflib.get_close_matches(unknown[0], names, 1, 0.4)
        parser.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    return vars(given)


def configure(argv: list[str]) -> Config:
    """The resolved configuration of a new run, a resumed one, or an evaluation. Raises ValueError with one line."""
    given = parse_flags(argv)
    saved, folder = {}, given.get("resume") or given.get("eval_only")
    if folder and (Path(folder) / "metrics.jsonl").exists():
        saved = json.loads((Path(folder) / "config.json").read_text())
    if given.get("resume"):
        if not saved:
            raise ValueError(f"--resume {folder}: not a run folder (no metrics.jsonl in it)")
        fixed = [name for name in given if name not in CHANGEABLE and given[name] != saved[name]]
        if fixed:
            raise ValueError(f"--{fixed[0]} {given[fixed[0]]}: a resumed run keeps {saved[fixed[0]]}; "
                             f"only {', '.join(sorted(CHANGEABLE))} may differ")
    cfg = Config(**{**saved, **given})
    if saved:
        cfg.out = cfg.out if given.get("eval_only") else folder
        cfg.model = str(find_checkpoint(Path(folder) / "checkpoint"))
    elif given.get("eval_only"):
        cfg.model = folder
    return validate(resolve(cfg))


def resolve(cfg: Config) -> Config:
    """Fill in what depends on the algorithm, the model and the environment."""
    if cfg.algo not in ALGORITHMS:
        raise ValueError(f"--algo {cfg.algo}: must be one of {', '.join(ALGORITHMS)}")
    tiny = cfg.model == "tiny"
    lr = {"sft": 1e-3 if tiny else 1e-5}.get(cfg.algo, 1e-4 if tiny else 1e-6)
    defaults = ALGORITHMS[cfg.algo] | dict(
        lr=lr, iters={"bandit": 60}.get(cfg.env, 150), max_new_tokens=80 if tiny else 200,
        critic_lr=10 * (cfg.lr or lr), eval_envs=cfg.env)
    for name, value in defaults.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    if cfg.out is None:
        base = Path("runs") / f"{Path(cfg.env.split(':')[0]).stem.replace(',', '+')}-{cfg.algo}-{cfg.estimator}-seed{cfg.seed}"
        names = (base if i == 1 else base.with_name(f"{base.name}-{i}") for i in range(1, 10_000))
        cfg.out = str(next(name for name in names if not name.exists()))
    return cfg


def validate(cfg: Config) -> Config:
    """Check every field whose bad value would only show later. Raises ValueError naming flag, value and what is allowed."""
    at_least_one = ("groups", "group_size", "iters", "epochs", "minibatch_size", "max_new_tokens", "eval_n",
                    "tokens_per_micro_batch")
    rules = [(name, getattr(cfg, name) >= 1, "1 or more") for name in at_least_one]
    rules += [(name, getattr(cfg, name) is None or getattr(cfg, name) >= 1, "1 or more")
              for name in ("max_turns", "max_actions_per_turn", "max_actions")]
    rules += [(name, getattr(cfg, name) >= 0, "0 or more") for name in (
        "seed", "threads", "eval_every", "save_every", "eval_temperature", "kl_coef", "entropy_coef", "format_penalty")]
    rules += [(name, 0 <= getattr(cfg, name) <= 1, "between 0 and 1")
              for name in ("gamma", "lam", "gamma_turn", "lam_turn", "careful")]
    rules += [(name, getattr(cfg, name) > 0, "above 0")
              for name in ("lr", "critic_lr", "temperature", "clip_ratio_high", "max_grad_norm")]
    rules += [
        ("keep", 0 < cfg.keep <= 1, "above 0 and at most 1"),
        ("estimator", cfg.estimator in ("grpo", "gae", "bilevel"), "grpo, gae or bilevel"),
        ("noise", cfg.noise in ("independent", "shared"), "independent or shared"),
        ("eval_split", cfg.eval_split in SPLITS, "test or tune"),
        ("dtype", cfg.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
        ("clip_ratio_low", 0 < cfg.clip_ratio_low <= min(1, cfg.clip_ratio_high), "above 0, at most 1 and clip_ratio_high"),
        ("value_clip", cfg.value_clip is None or cfg.value_clip > 0, "above 0"),
        ("group_size", cfg.group_size > 1 or cfg.algo == "sft" or (cfg.estimator != "grpo" and cfg.keep == 1),
         "2 or more with --estimator grpo or --keep below 1: one episode has nothing to be compared with"),
        ("noise", cfg.group_size <= 4096, "for at most 4096 members a group")]
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{field.name} {value}: must be a finite number")
    for name, fine, allowed in rules:
        if not fine:
            raise ValueError(f"--{name} {getattr(cfg, name)}: must be {allowed}")
    if not cfg.resume and not cfg.eval_only and (Path(cfg.out) / "metrics.jsonl").exists():
        raise ValueError(f"--out {cfg.out}: already holds a run; name another folder, or go on with --resume {cfg.out}")
    for name in {*(cfg.env.split(",") if cfg.algo == "sft" else [cfg.env]), *cfg.eval_envs.split(",")}:
        env = make(cfg, name)
        env.reset(0, options={"noise_seed": 0})
    return cfg


def main(argv: list[str] | None = None) -> dict | None:
    """Command line: configure, load, then train, or evaluate. Bad input ends with one line and exit code 2."""
    try:
        cfg = configure(sys.argv[1:] if argv is None else argv)
        if cfg.threads:
            torch.set_num_threads(cfg.threads)
        model, tokenizer = load_policy(cfg.model, cfg.device, cfg.dtype)
        critic = Critic(cfg.model, cfg.device, cfg.dtype) if cfg.estimator != "grpo" else None
        start = cfg.model if not cfg.resume else json.loads((Path(cfg.resume) / "config.json").read_text())["model"]
        reference = load_policy(start, cfg.device, cfg.dtype)[0] if cfg.kl_coef and cfg.algo != "sft" else None
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{cfg.model}: {parameters / 1e6:.1f} M parameters on {model.device}, {torch.get_num_threads()} threads\n"
          + "  ".join(f"{k}={v}" for k, v in dataclasses.asdict(cfg).items() if v is not None))
    if cfg.eval_only:
        return evaluate_only(cfg, model, tokenizer)
    if cfg.algo == "sft":
        return supervised(cfg, model, tokenizer)
    return train(cfg, model, tokenizer, critic, reference)


if __name__ == "__main__":
    main()
