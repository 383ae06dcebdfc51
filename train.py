"""Train a language-model agent with StarPO: roll out, filter, advantages, update, again.

    python train.py --env sokoban                   # StarPO-S on the built-in tiny model: minutes on a laptop
    python train.py --env bandit --algo starpo      # the vanilla algorithm: KL, symmetric clipping, no filter
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --env sokoban --device cuda

StarPO treats a whole dialogue (thoughts, answers, observations) as one trajectory. An iteration samples
`groups` levels, plays each `group_size` times, and takes policy-gradient steps on the tokens that were
sampled. StarPO-S keeps only the quarter of the groups whose rewards vary most, drops the KL term, and clips
upward moves later than downward ones.

Differences from RAGEN: levels and luck have separate seeds, observations carry no gradient, and every
success rate stands between a random valid policy and the best possible one (README, "same / different /
left out").

In reading order: Config, train (the loop), demonstrations (--algo sft), the seeds, evaluate, the report, the
command line.
"""
import argparse
import ast
import dataclasses
import difflib
import itertools
import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from envs import make_env, random_success
from model import (Clock, Critic, Interrupt, Run, context_length, find_checkpoint, first_line, join_ranks,
                   load_policy, memory_plan, read_model, trainable)
from results.monitor import echo_trap
from results.plot import draw_run, print_summary, show
from rollout import Trajectories, join, probe, rollout
from starpo import (compute_advantages, episode_rewards, filter_groups, indicators, my_rank, over_ranks,
                    token_logprobs, token_values, update)


def option(default, help: str, allowed=None):
    """A Config field: default, help text (unit, usual range), what is allowed: (least, most) or a list."""
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed})


@dataclass
class Config:
    """Everything a run depends on. One command-line flag a field; the resolved values are printed and
    saved. None means "by algorithm, model or environment": see ALGORITHMS and resolve()."""
    env: str = option("sokoban", "bandit, sokoban, frozenlake, a variant of them, or path/to/file.py:Class")
    env_args: str = option("", "overrides of the environment, as in low_reward=0.35,max_turns=3")
    model: str = option("tiny", "tiny (built in), a local folder, or a hub id")
    algo: str = option("starpo-s", "the paper's switches, or supervised", ["starpo", "starpo-s", "sft"])
    estimator: str = option("grpo", "of advantages; the last two have a critic", ["grpo", "gae", "bilevel"])
    groups: int = option(8, "levels an iteration, P (usual 4..32)", (1, 10**9))
    group_size: int = option(16, "episodes a level, N (usual 4..32)", (1, 4096))
    iters: int = option(None, "iterations (tiny 30, else 200)", (1, 10**9))
    epochs: int = option(1, "passes over the kept trajectories (usual 1..4)", (1, 10**9))
    minibatch_size: int = option(32, "trajectories an optimizer step", (1, 10**9))
    lr: float = option(None, "policy learning rate (tiny 3e-4; a pretrained 0.5 B model 1e-6)", (1e-9, 1e9))
    critic_lr: float = option(None, "critic learning rate (usual 10 x lr)", (1e-9, 1e9))
    gamma: float = option(1.0, "discount a token", (0, 1))
    lam: float = option(1.0, "GAE lambda a token", (0, 1))
    gamma_turn: float = option(0.95, "discount a turn (bilevel)", (0, 1))
    lam_turn: float = option(1.0, "GAE lambda a turn (bilevel)", (0, 1))
    keep: float = option(None, "share of groups kept, by in-group reward std (1: all)", (1e-9, 1))
    clip_ratio_low: float = option(0.2, "the ratio may fall to 1 - this", (1e-9, 1))
    clip_ratio_high: float = option(None, "the ratio may rise to 1 + this (0.28 in StarPO-S)", (1e-9, 1e9))
    value_clip: float = option(None, "clip of value changes; none by default: returns reach 11", (1e-9, 1e9))
    kl_coef: float = option(None, "weight of the KL to the start (in the reward with a critic)", (0, 10**9))
    format_penalty: float = option(0.1, "taken from the reward of a turn without a valid action", (0, 10**9))
    normalize_std: bool = option(True, "divide GRPO advantages by the group's standard deviation")
    entropy_coef: float = option(0.0, "weight of the entropy bonus (paper: 0.001)", (0, 10**9))
    token_mean: bool = option(False, "average the loss over tokens instead of over trajectories")
    warmup: int = option(10, "iterations over which the learning rates rise to their values", (0, 10**9))
    max_grad_norm: float = option(1.0, "gradients are clipped to this L2 norm", (1e-9, 1e9))
    temperature: float = option(1.0, "sampling temperature of training", (1e-9, 1e9))
    eval_temperature: float = option(0.5, "sampling temperature of evaluation (0: greedy)", (0, 10**9))
    max_new_tokens: int = option(None, "longest reply, tokens (tiny 80, else 200)", (1, 10**9))
    max_turns: int = option(None, "turns an episode (the environment's own: 5)", (1, 10**9))
    max_actions_per_turn: int = option(None, "actions a turn (the environment's own: 5)", (1, 10**9))
    max_actions: int = option(None, "actions an episode (the environment's own: 10)", (1, 10**9))
    think: bool = option(True, "thoughts before answers")
    noise: str = option("independent", "luck of a group's members", ["independent", "shared"])
    careful: float = option(1.0, "sft: share of dialogues that the solver plays", (0, 1))
    seed: int = option(0, "all seeds are counted from this one", (0, 2 * 10**8))
    out: str = option(None, "run folder (runs/ENV-ALGO-ESTIMATOR-SEED)")
    resume: str = option(None, "run folder to go on with")
    eval_only: str = option(None, "run folder, model folder or tiny: evaluate it and stop")
    eval_envs: str = option(None, "environments to evaluate on, as in sokoban,sokoban-large")
    eval_n: int = option(1024, "held-out levels, before and after (1024: +-3 points)", (1, 10**9))
    eval_split: str = option("test", "tune: other levels, to choose settings by", ["test", "tune"])
    eval_every: int = option(20, "iterations between evaluations on 256 levels (0: never)", (0, 10**9))
    save_every: int = option(10, "iterations between checkpoints (0: only at the end)", (0, 10**9))
    on_collapse: str = option(None, "when the monitor fires (rollback halves lr)", ["stop", "rollback"])
    tokens_per_micro_batch: int = option(None, "tokens a pass (tiny 2048, else 768; GPU 8192)", (1, 10**9))
    lora_rank: int = option(0, "train LoRA factors alone (0: all weights; 8..64, at 10 x lr)", (0, 4096))
    preset: str = option(None, "defaults of another kind (paper: Qwen2.5-0.5B, PPO)", ["paper"])
    dry_run: bool = option(False, "print what an iteration needs, load no weights, and stop")
    device: str = option("auto", "auto (cuda, mps, cpu) or a torch device")
    dtype: str = option("auto", "of the forward pass", ["auto", "float32", "bfloat16"])
    threads: int = option(0, "CPU threads (0: torch's choice)", (0, 10**9))


ALGORITHMS = {
    "starpo": dict(keep=1.0, clip_ratio_high=0.2, kl_coef=0.001),
    "starpo-s": dict(keep=0.25, clip_ratio_high=0.28, kl_coef=0.0),
    "sft": dict(keep=1.0, clip_ratio_high=0.2, kl_coef=0.0),
}
PRESETS = {"paper": dict(model="Qwen/Qwen2.5-0.5B-Instruct", estimator="gae", lr=1e-6, entropy_coef=0.001,
                         warmup=0, max_new_tokens=400, eval_every=10, eval_n=256)}
TUNED = {("frozenlake", "starpo-s", "tiny"): dict(keep=0.5, lr=1e-4)}      # rewards are mostly luck
TRAIN_SEEDS = 10_000_000                        # training levels, above all evaluation levels
SPLITS = {"test": 0, "tune": 5_000_000}         # first level of the evaluation sets
# the fields of Config that compute_advantages and update take by the same name:
ADVANTAGE_OPTIONS = "kl_coef gamma lam gamma_turn lam_turn normalize_std"
UPDATE_OPTIONS = ("epochs minibatch_size tokens_per_micro_batch clip_ratio_low clip_ratio_high value_clip "
                  "kl_coef entropy_coef token_mean temperature max_grad_norm")
CHANGEABLE = {"iters", "eval_every", "save_every", "on_collapse", "device", "threads", "resume"}    # --resume
# on the screen:
COLUMNS = {"success": "success", "reward_mean": "reward", "reward_std_in_group": "std", "entropy": "entropy",
           "valid_frac": "valid", "reply_len": "len", "grad_norm": "grad", "eval_success": "eval"}


# -------------------------------------------------------------------------------------------- the algorithm

def train(cfg: Config, model, tokenizer, critic, reference) -> dict:
    """StarPO: each iteration is rollout, filter, advantages, update. Fills the run folder; returns its
    summary."""
    clock, (rank, ranks), stop, failed = Clock(), my_rank(), Interrupt(), 0
    run = Run(dict(vars(cfg)), COLUMNS, rank)
    advantage_options, update_options = ({name: getattr(cfg, name) for name in names.split()}
                                         for names in (ADVANTAGE_OPTIONS, UPDATE_OPTIONS))
    sft = cfg.algo == "sft"     # the policy gradient with advantage 1, on dialogues that somebody else played
    optimizers = {name: torch.optim.AdamW(trainable(module).values(), weight_decay=0.0)
                  for name, module in (("policy", model), ("critic", critic)) if module is not None}
    start = run.restore(cfg.resume, model, critic, optimizers) if cfg.resume else 0
    with clock("evaluation"):                   # of a resumed run, too, "before" is where it began
        origin = load_policy(cfg.model, cfg.device, cfg.dtype)[0] if cfg.resume else model
        before, run.first = first_evaluation(cfg, origin, tokenizer)

    if cfg.on_collapse and not (run.folder / "healthy").exists():
        run.save(start, model, tokenizer, critic, optimizers, healthy=True)
    for iteration in stop.during(range(start, cfg.iters)):
        began, pace = time.perf_counter(), min((iteration + 1) / max(1, cfg.warmup), 1) / 2 ** run.rollbacks()
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = pace * (cfg.lr if name == "policy" else cfg.critic_lr)

        with clock("rollout"):
            batch = (demonstrations if sft else play_groups)(cfg, model, tokenizer, iteration)
        clock["environment"] += sum(info["env_seconds"] for info in batch.infos)     # a part of the rollout's

        with clock("update"):
            returns = episode_rewards(batch.rewards, batch.penalties)                        # (B,)
            keep = filter_groups(returns, batch.group_ids, cfg.keep)                         # (B,) bool
            metrics = {**indicators(batch, returns), "groups_kept": len(batch.group_ids[keep].unique())}
            kept, metrics["optimizer_steps"] = batch.select(keep), 0
            if len(kept):
                mine = kept.loss_mask & (torch.arange(len(kept)) % ranks == rank).to(keep.device)[:, None]
                with torch.no_grad():                   # both (B, T); each rank scores its rows
                    ref_logprobs = reference and sum(over_ranks(token_logprobs(
                        reference, kept.tokens, mine, kept.group_ids, cfg.temperature,
                        vocab_size=len(tokenizer))[0].cpu()))
                    values = critic and sum(over_ranks(
                        token_values(critic, kept.tokens, mine, kept.group_ids).cpu()))
                advantages, targets = (kept.loss_mask.float(), None) if sft else compute_advantages(
                    cfg.estimator, kept, values, ref_logprobs, **advantage_options)
                metrics |= update(
                    model, optimizers["policy"], kept, advantages, supervised=sft, ref_logprobs=ref_logprobs,
                    critic=critic, critic_optimizer=optimizers.get("critic"), old_values=values,
                    returns=targets, kl_in_loss=critic is None, vocab_size=len(tokenizer),
                    shuffle_seed=sample_seed(cfg, iteration), **update_options)

        if cfg.eval_every and (iteration + 1) % cfg.eval_every == 0:
            with clock("evaluation"):
                quick = evaluate(cfg, model, tokenizer, min(cfg.eval_n, 256), cfg.eval_temperature)
                metrics["eval_success"] = success_of(quick).mean().item()
        metrics["echo_trap"], healthy = echo_trap([*run.rows, metrics])     # changes nothing, unless asked to
        if metrics["echo_trap"] and cfg.on_collapse == "rollback":
            metrics["rolled_back_to"] = run.rollback(model, critic, optimizers)
        run.log(iteration, metrics, time.perf_counter() - began, batch.texts[:cfg.group_size])
        failed = failed + 1 if metrics.get("skipped_steps") and not metrics["optimizer_steps"] else 0
        if failed == 3 or metrics["echo_trap"] and cfg.on_collapse == "stop":
            sys.exit(f"train.py: {metrics['echo_trap'] or '3 times without a finite gradient'}; {run.good()}")
        stopped = any(over_ranks(stop.asked))
        due = cfg.save_every and (iteration + 1) % cfg.save_every == 0
        if due or iteration + 1 == cfg.iters or stopped:
            run.save(iteration + 1, model, tokenizer, critic, optimizers, cfg.on_collapse and due and healthy)
        if stopped and iteration + 1 < cfg.iters:
            sys.exit(f"saved after iteration {iteration + 1}; python train.py --resume {run.folder} goes on")

    with clock("evaluation"):
        after = evaluate(cfg, model, tokenizer, cfg.eval_n, cfg.eval_temperature)
    return report(cfg, run, before, after, clock)


def play_groups(cfg: Config, model, tokenizer, iteration: int) -> Trajectories:
    """One iteration's rollouts: `groups` levels, each played `group_size` times with luck of its own. Ranks
    share the groups, and each gets all the trajectories."""
    first, (rank, ranks) = train_seed(cfg, iteration * cfg.groups), my_rank()
    mine = torch.arange(cfg.groups).tensor_split(ranks)[rank].tolist()
    rows = [(group, first + group, member) for group in mine for member in range(cfg.group_size)]
    noise_seeds = [noise_seed(level, member * (cfg.noise == "independent")) for _, level, member in rows]
    with tqdm(total=len(rows), desc=f"rollout {iteration + 1}", leave=False, disable=None) as bar:
        batch = rollout(
            model, tokenizer, [make(cfg) for _ in rows], [level for _, level, _ in rows], noise_seeds,
            [group for group, _, _ in rows], temperature=cfg.temperature, max_new_tokens=cfg.max_new_tokens,
            sample_seed=sample_seed(cfg, iteration), think=cfg.think, format_penalty=cfg.format_penalty,
            progress=lambda n: bar.update(n - bar.n))
    return join(over_ranks(batch.cpu())) if ranks > 1 else batch


def demonstrations(cfg: Config, model, tokenizer, iteration: int) -> Trajectories:
    """--algo sft: groups x group_size dialogues played by the solvers, each on a new level, with ids and
    mask like sampled ones. A share `careful` of them reasons and acts by the solver, the others have a
    hunch and act at random. --env a,b,b draws from several environments; rows are grouped by environment,
    whose prompts begin alike."""
    names, count, limit = cfg.env.split(","), cfg.groups * cfg.group_size, context_length(model) or 4000
    seeds = [train_seed(cfg, iteration * count + i) for i in range(count)]
    rows = sorted(((names[seed % len(names)], seed) for seed in seeds))
    dice = [random.Random(seed) for _, seed in rows]
    careful = [rng.random() < cfg.careful for rng in dice]
    return rollout(None, tokenizer, [make(cfg, name) for name, _ in rows], [seed for _, seed in rows],
                   [noise_seed(seed, 0) for _, seed in rows], [names.index(name) for name, _ in rows],
                   max_new_tokens=min(1000, limit // 4), max_context=limit, think=cfg.think,
                   script=lambda env, row: env.demonstrate(dice[row], careful[row], cfg.think))


# ----------------------------------------------------------------------------------------- levels and seeds

def train_seed(cfg: Config, number: int) -> int:
    """The seed of a run's training level `number`: counted up, so that none comes twice."""
    return TRAIN_SEEDS * (1 + cfg.seed) + number


def noise_seed(level: int, member: int) -> int:
    """The seed of one episode's luck (slips, payouts)."""
    return level * 4096 + member


def sample_seed(cfg: Config, iteration: int) -> int:
    """Which streams of uniforms the rows of an iteration sample from (evaluation: 0)."""
    return (1 + cfg.seed) * 1_000_000 + iteration


def make(cfg: Config, name: str | None = None):
    """An environment with the run's limits, and its overrides where it is the run's own environment."""
    names = ("max_turns", "max_actions_per_turn", "max_actions")
    limits = {key: getattr(cfg, key) for key in names if getattr(cfg, key) is not None}
    overrides = parse_overrides(cfg.env_args) if name in (None, cfg.env) else {}
    return make_env(name or cfg.env.split(",")[0], **overrides, **limits)


# ----------------------------------------------------------------------------------------------- evaluation

def evaluate(cfg: Config, model, tokenizer, n: int, temperature: float, name: str | None = None) -> list:
    """Play n held-out levels once each -> Trajectories in batches; levels, luck and streams are always the
    same."""
    batches, first, (rank, ranks) = [], SPLITS[cfg.eval_split], my_rank()
    mine = torch.arange(first, first + n).tensor_split(ranks)[rank]
    for chunk in tqdm(mine.split(256) if len(mine) else (), "evaluation", leave=False, disable=None):
        seeds = chunk.tolist()
        batches.append(rollout(
            model, tokenizer, [make(cfg, name) for _ in seeds], seeds, [noise_seed(s, 0) for s in seeds],
            seeds, temperature=temperature, max_new_tokens=cfg.max_new_tokens, think=cfg.think))
    return sum(over_ranks([batch.cpu() for batch in batches]), []) if ranks > 1 else batches


def success_of(batches: list[Trajectories]) -> torch.Tensor:
    """(n,) float: 1 where an episode succeeded."""
    return torch.cat([batch.success for batch in batches]).double().cpu()


def baselines(cfg: Config, name: str | None = None) -> tuple[float | None, float | None]:
    """Success of uniform valid actions over the whole budget, and of the best policy, on the evaluation
    levels."""
    env, seeds = make(cfg, name), range(SPLITS[cfg.eval_split], SPLITS[cfg.eval_split] + cfg.eval_n)
    chance = [random_success(env, seed) for seed in seeds]
    best = [env.reset(seed) and env.optimal_success() for seed in seeds]
    return tuple(None if None in x else sum(x) / len(x) for x in (chance, best))


def evaluate_only(cfg: Config, model, tokenizer) -> dict:
    """--eval_only: success on held-out levels of each environment in --eval_envs, between random and
    optimal."""
    found, n = {}, cfg.eval_n
    for name in cfg.eval_envs.split(","):
        batches = evaluate(cfg, model, tokenizer, n, cfg.eval_temperature, name)
        (chance, best), found[name] = baselines(cfg, name), success_of(batches).mean().item()
        print(f"{batches[0].texts[0]}\n{name}: success {show(found[name], n)}, random {show(chance)}, "
              f"optimal {show(best)}  ({n} levels, temperature {cfg.eval_temperature})")
    return found


# ----------------------------------------------------------------------------------------------- the report

def first_evaluation(cfg: Config, model, tokenizer) -> tuple[list[Trajectories], dict]:
    """Success before training, at the evaluation temperature and greedy, between random and optimal play."""
    chance, best = baselines(cfg)
    before, greedy = (evaluate(cfg, model, tokenizer, cfg.eval_n, t) for t in (cfg.eval_temperature, 0.0))
    first = {"success_random": chance, "success_before_greedy": success_of(greedy).mean().item(),
             "success_before": success_of(before).mean().item(), "success_optimal": best}
    print(f"before training, {cfg.eval_n} held-out levels: "
          + ", ".join(f"{key[8:]} {show(x, 'before' in key and cfg.eval_n)}" for key, x in first.items()))
    return before, first


def report(cfg: Config, run: Run, before: list, after: list, clock: Clock) -> dict:
    """The closing table, two dialogues of one level, summary.json and curves.png."""
    n, end, env = cfg.eval_n, success_of(after), make(cfg)
    count = cfg.iters * cfg.groups * (cfg.group_size if cfg.algo == "sft" else 1)
    met = {env.reset(train_seed(cfg, number))[0] for number in range(count)}    # all levels of the training
    gain = end - success_of(before)             # level by level: the same levels and luck before and after
    summary = {**run.first, "success_after": end.mean().item(), "gain": gain.mean().item(),
               "gain_ci95": 1.96 * gain.std(correction=0).item() / n ** 0.5, "eval_n": n,
               "seen_in_training": sum(info["level"] in met for x in after for info in x.infos) / n,
               "iters": cfg.iters, "seconds": time.perf_counter() - run.began, "time": dict(clock)}
    run.write("summary.json", json.dumps(summary, indent=1))
    for title, batches in (("BEFORE", before), ("AFTER", after)):
        text = [text for batch in batches for text in batch.texts][int(gain.argmax())]
        print(f"\n----- {title} (held-out level {int(gain.argmax())}) -----\n{text}")
    print_summary(summary, cfg.env, cfg.eval_temperature)
    draw_run(run.folder)
    print(f"run folder: {run.folder}   (evaluate again: python train.py --eval_only {run.folder})")
    return summary


# ----------------------------------------------------------------------------------------- the command line

def parse_overrides(text: str) -> dict:
    """"low_reward=0.35,arms=('A','B')" -> {"low_reward": 0.35, "arms": ("A", "B")}: literals only."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        assert not call.args and all(word.arg for word in call.keywords)
        return {word.arg: getattr(word.value, "id", None) or ast.literal_eval(word.value)
                for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError, AttributeError):
        raise ValueError(f"--env_args {text}: must be name=value,name=value") from None


def parse_flags(argv: list[str]) -> dict:
    """The flags that were given, as a dict; a misspelt one ends with the nearest name."""
    raw, absent = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    parser = argparse.ArgumentParser(None, None, __doc__, formatter_class=raw, argument_default=absent,
                                     allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"train.py: {message}\n")      # one line, no usage page
    for field in dataclasses.fields(Config):
        how = dict(action=argparse.BooleanOptionalAction) if field.type is bool else dict(type=field.type)
        parser.add_argument(f"--{field.name}", help=f"{field.metadata['help']} [{field.default}]", **how)
    alike = lambda flag: ("--" + flag[0][2:].replace("-", "_")).replace("--no_", "--no-", 1)    # --eval-only
    given, unknown = parser.parse_known_args([re.sub("^--[^=]*", alike, word) for word in argv])
    if unknown:
        names = [f"--{name}" for name in vars(Config())]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, 1, 0.4) or ["--help"]
        parser.error(f"unknown argument {unknown[0]}; did you mean {near[0]}?")
    return vars(given)


def configure(argv: list[str]) -> Config:
    """The configuration of a new run, a resumed one, or an evaluation. Raises ValueError with one line."""
    given = parse_flags(argv)
    given = PRESETS.get(given.get("preset"), {}) | given
    folder = Path(given.get("resume") or given.get("eval_only") or "")
    saved = json.loads((folder / "config.json").read_text()) if (folder / "metrics.jsonl").exists() else {}
    if "resume" in given:
        if not saved:
            raise ValueError(f"--resume {folder}: not a run folder (it holds no metrics.jsonl)")
        if kept := [name for name in given.keys() - CHANGEABLE if given[name] != saved[name]]:
            raise ValueError(f"--{kept[0]} {given[kept[0]]}: a resumed run keeps {saved[kept[0]]}; only "
                             f"{', '.join(sorted(CHANGEABLE - {'resume'}))} may differ")
        saved["out"] = str(folder)
    elif "eval_only" in given and not saved:
        saved["model"] = given["eval_only"]
    saved |= {"eval_envs": None} if "env" in given else {}      # another game: evaluate on that
    return validate(resolve(Config(**{**saved, **given})))


def weights_of(cfg: Config) -> str:
    """Where a run's weights come from: its model, or the checkpoint of the run it resumes or evaluates."""
    folder = (not cfg.lora_rank and cfg.resume) or cfg.eval_only     # LoRA: the start; factors come later
    return str(find_checkpoint(Path(folder) / "checkpoint")) if folder and folder != cfg.model else cfg.model


def resolve(cfg: Config) -> Config:
    """Fill in what depends on the algorithm, the model and the environment."""
    tiny, tuned = cfg.model == "tiny", TUNED.get((cfg.env, cfg.algo, cfg.model), {})
    lr = (6e-4 if tiny else 1e-5) if cfg.algo == "sft" else tuned.get("lr", 3e-4 if tiny else 1e-6)
    folder = f"runs/{Path(cfg.env.partition(':')[0]).stem}-{cfg.algo}-{cfg.estimator}-seed{cfg.seed}"
    free = (folder if i == 1 else f"{folder}-{i}" for i in itertools.count(1))
    defaults = ALGORITHMS.get(cfg.algo, {}) | dict(
        lr=lr, critic_lr=10 * (cfg.lr or lr), eval_envs=cfg.env, iters=30 if tiny else 200,
        max_new_tokens=80 if tiny else 200, tokens_per_micro_batch=2048 if tiny else 768,
        out=next(path for path in free if not Path(path).exists())) | tuned
    return dataclasses.replace(cfg, **{name: x for name, x in defaults.items() if getattr(cfg, name) is None})


def validate(cfg: Config) -> Config:
    """Check what would only fail later. Raises ValueError naming the flag, its value and what is allowed."""
    for field in dataclasses.fields(cfg):
        value, allowed = getattr(cfg, field.name), field.metadata["allowed"] or [getattr(cfg, field.name)]
        listed = isinstance(allowed, list)          # where nothing is said, a field allows what it is
        if value is not None and not (value in allowed if listed else allowed[0] <= value <= allowed[1]):
            raise ValueError(f"--{field.name} {value}: must be in {list(allowed)}")
    if cfg.groups < int(os.environ.get("WORLD_SIZE", 1)):
        raise ValueError(f"--groups {cfg.groups}: must be at least the number of processes")
    if cfg.clip_ratio_low > cfg.clip_ratio_high:
        raise ValueError(f"--clip_ratio_low {cfg.clip_ratio_low}: must be at most {cfg.clip_ratio_high}")
    if cfg.group_size == 1 and cfg.algo != "sft" and (cfg.estimator == "grpo" or cfg.keep < 1):
        raise ValueError("--group_size 1: must be at least 2 with --estimator grpo or --keep below 1")
    used = Path(cfg.out).is_file() or (Path(cfg.out) / "metrics.jsonl").exists()
    if used and not (cfg.resume or cfg.eval_only):
        raise ValueError(f"--out {cfg.out}: is there already; name another folder, or --resume {cfg.out}")
    if "," in cfg.env and (cfg.env_args or cfg.algo != "sft") and not cfg.eval_only:
        raise ValueError(f"--env {cfg.env}: several games are for --algo sft, without --env_args")
    for name in {*cfg.env.split(","), *cfg.eval_envs.split(",")}:
        try:
            random_success(make(cfg, name), 0, 1)
        except Exception as error:      # a game of the user's may do anything
            raise ValueError(f"--env {name} (--env_args '{cfg.env_args}'): {first_line(error)}") from None
    return cfg


def dry_run(cfg: Config) -> dict:
    """--dry_run: the tokens and memory an iteration needs, without any weights."""
    model, tokenizer = read_model(weights_of(cfg), cfg.lora_rank)
    silent, rl = silent_episode(cfg, model, tokenizer), cfg.algo != "sft"
    plan = memory_plan(model, rows=cfg.groups * cfg.group_size, turns=silent.rewards.shape[1],
                       max_new_tokens=cfg.max_new_tokens, shown_tokens=int(silent.lengths[0]),
                       critic=rl and cfg.estimator != "grpo", reference=rl and cfg.kl_coef > 0)
    print(json.dumps(plan, indent=1))
    return plan


def silent_episode(cfg: Config, model, tokenizer) -> Trajectories:
    """An episode of empty replies: what a row is shown. Raises ValueError if there is no room for a reply."""
    return rollout(None, tokenizer, [make(cfg)], [0], [0], [0], max_new_tokens=cfg.max_new_tokens,
                   max_context=context_length(model), script=lambda env, row: "")


def main(argv: list[str] | None = None) -> dict:
    """Command line: configure, load, then train or evaluate. Bad input ends with one line and exit code 2."""
    try:
        cfg = configure(sys.argv[1:] if argv is None else argv)
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        if cfg.dry_run:
            return dry_run(cfg)
        join_ranks()
        rank = 0 if cfg.eval_only else cfg.lora_rank
        model, tokenizer = load_policy(weights_of(cfg), cfg.device, cfg.dtype, rank)
        probe(cfg.model, model)
        silent_episode(cfg, model, tokenizer)
        training, source = cfg.algo != "sft" and not cfg.eval_only, (cfg.model, cfg.device, cfg.dtype)
        critic = Critic(*source, cfg.lora_rank) if training and cfg.estimator != "grpo" else None
        reference = load_policy(*source)[0] if training and cfg.kl_coef else None
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.1f} M parameters on {model.device}, {torch.get_num_threads()} threads\n"
          + "  ".join(f"{name}={value}" for name, value in vars(cfg).items() if value is not None))
    if cfg.eval_only:
        return evaluate_only(cfg, model, tokenizer)
    return train(cfg, model, tokenizer, critic, reference)


if __name__ == "__main__":
    main()
