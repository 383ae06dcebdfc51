"""A whole step, sampling and update, beside TRL's GRPOTrainer: same model, prompts, group size, reply length.

    pip install trl
    python tests/bench_trl.py --model FOLDER

TRL's trainer plays one turn, so both do: 2 Sokoban levels, 8 replies of at most 32 tokens each, one optimizer step of
GRPO without KL, float32, temperature 1. The two take turns; medians over the steps, and their ratio.
"""
import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import first_prompt, make_env  # noqa: E402
from model import load_policy  # noqa: E402
from rollout import rollout  # noqa: E402
from starpo import compute_advantages, update  # noqa: E402

LEVELS, SIZE, NEW_TOKENS = 2, 8, 32


def our_step(model, tokenizer, optimizer, seed: int) -> int:
    """Tokens sampled."""
    rows = range(LEVELS * SIZE)
    groups = [row // SIZE for row in rows]
    batch = rollout(model, tokenizer, [make_env("sokoban", max_turns=1) for _ in rows], groups, rows, groups,
                    max_new_tokens=NEW_TOKENS, sample_seed=seed)
    batch.rewards += torch.randn(batch.rewards.shape)               # so that no advantage is 0
    advantages, _ = compute_advantages("grpo", batch)
    update(model, optimizer, batch, advantages, minibatch_size=len(batch))
    return int(batch.loss_mask.sum())


def trl_trainer(name: str, micro_batch: int, steps: int):
    """A GRPOTrainer on the same prompts, and the callback that keeps the seconds of its steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        seconds = []

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.began)
            self.then()                                                 # a step of ours behind every step of TRL's

    prompts = [make_env("sokoban", max_turns=1) for _ in range(LEVELS)]
    prompts = [[{"role": "user", "content": first_prompt(env, env.reset(level)[0])}] for level, env in enumerate(prompts)]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), bf16=False, learning_rate=1e-9, beta=0.0,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=LEVELS * SIZE // micro_batch,
        num_generations=SIZE, max_completion_length=NEW_TOKENS, temperature=1.0, loss_type="grpo", max_steps=steps,
        gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=1000, disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    watch = Watch()
    trainer = GRPOTrainer(
        model=model, processing_class=AutoTokenizer.from_pretrained(name), args=config, callbacks=[watch],
        reward_funcs=lambda completions, **_: torch.randn(len(completions)).tolist(),
        train_dataset=Dataset.from_dict({"prompt": prompts * 8}))
    return trainer, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro_batch", type=int, default=16, help="rows that TRL trains on at once")
    flags = parser.parse_args()
    try:
        trainer, watch = trl_trainer(flags.model, flags.micro_batch, flags.steps + 1)
    except ImportError:
        parser.error("needs trl (pip install trl)")
    model, tokenizer = load_policy(flags.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    seconds, sampled = [], 0

    def ours() -> None:
        nonlocal sampled
        began = time.perf_counter()
        sampled = our_step(model, tokenizer, optimizer, len(seconds))
        seconds.append(time.perf_counter() - began)

    watch.then = ours
    trainer.train()
    mine, theirs = (statistics.median(times[1:]) for times in (seconds, watch.seconds))         # the first warms up
    print(f"a step: TRL {theirs:.1f} s, ours {mine:.1f} s: {theirs / mine:.2f} times as fast "
          f"(ours sampled {sampled} tokens; {flags.steps} steps, {torch.get_num_threads()} threads)")


if __name__ == "__main__":
    main()
