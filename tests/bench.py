"""What the shared cache and the packed rows save, measured side by side in one process.

    python tests/bench.py                          # the tiny model: 8 groups of 16, 5 turns
    python tests/bench.py --model FOLDER           # another: 2 groups of 8, 3 turns of 32 tokens
    python tests/bench.py --json FILE              # the same numbers for a program

The baselines are what today's minimal codebases do, with the same weights, dialogues and lengths:

rollout   every turn renders and encodes the whole dialogue again and calls transformers' generate() on the
          live rows, left-padded, with generate()'s own cache for that turn; no environment is stepped.
update    the rows of a micro-batch padded to its longest, logits over the whole vocabulary at every
          position, log-softmax, gather, the same loss, the same optimizer.

Times are medians over repeats that alternate between ours and the baseline; ratios come first. The rate of
the machine is the best of several square float32 matrix products in the same run. Floating-point operations
of an update: 6 x non-embedding parameters per token processed + 6 x vocabulary x hidden per position the
head is applied to; what attention and recomputation cost is not counted, so the share is a lower bound.
"""
import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import make_env  # noqa: E402
from model import ChatFormat, load_policy  # noqa: E402
from rollout import rollout  # noqa: E402
from starpo import compute_advantages, loss_weights, policy_loss, step_or_skip, update  # noqa: E402

SHAPES = {"tiny": dict(groups=8, size=16, turns=5, new_tokens=80, tokens_a_pass=2048),   # train.py's default
          "other": dict(groups=2, size=8, turns=3, new_tokens=32, tokens_a_pass=768)}


def sync(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(work, device):
    """Seconds of work() and what it returned."""
    sync(device)
    began = time.perf_counter()
    result = work()
    sync(device)
    return time.perf_counter() - began, result


def peak_memory(work, device) -> float:
    """MiB at the peak of work() above what was held before it. On the CPU a thread looks at the process's
    resident memory every few milliseconds."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)                # memory that was freed goes back to the system
    done, before = threading.Event(), resident()
    with ThreadPoolExecutor(1) as pool:
        peak = pool.submit(lambda: max(itertools.takewhile(
            lambda _: not done.wait(0.003), (resident() for _ in itertools.count()))))
        work()
        done.set()
    return peak.result() - before


def matmul_rate(device, size: int = 2048) -> float:
    """Floating-point operations a second of a float32 matrix product, the best of several."""
    a, b = torch.randn(2, size, size, device=device)
    return max(2 * size ** 3 / timed(lambda: a @ b, device)[0] for _ in range(8))


class Counted:
    """Counts the ids that go through a model's embedding while it is open."""

    def __init__(self, model):
        self.tokens, self.layer = 0, model.get_input_embeddings()

    def __enter__(self):
        def count(module, inputs):
            self.tokens += inputs[0].numel()
        self.handle = self.layer.register_forward_pre_hook(count)
        return self

    def __exit__(self, *error):
        self.handle.remove()


# ---------------------------------------------------------------------------------------------- ours

def play(model, tokenizer, shape, seed):
    rows = range(shape["groups"] * shape["size"])
    groups = [row // shape["size"] for row in rows]
    return rollout(model, tokenizer, [make_env("sokoban", max_turns=shape["turns"]) for _ in rows],
                   [1000 * seed + group for group in groups], [seed + row for row in rows], groups,
                   max_new_tokens=shape["new_tokens"], sample_seed=seed)


# ----------------------------------------------------------------------------------------- baselines

@torch.no_grad()
def generate_each_turn(model, tokenizer, batch, dialogues):
    """The rollout of `batch` again, turn by turn through generate(); dialogues: its texts, user and
    assistant alternating, (B) lists."""
    replies = [[int(mask[ids == turn].sum()) for turn in range(len(texts) // 2)]
               for mask, ids, texts in zip(batch.loss_mask, batch.turn_ids, dialogues)]
    tokenizer.padding_side = "left"
    for turn in range(max(map(len, replies))):
        live = [row for row, lengths in enumerate(replies) if len(lengths) > turn]
        roles = [[{"role": ("user", "assistant")[i % 2], "content": text}
                  for i, text in enumerate(dialogues[row][:2 * turn + 1])] for row in live]
        prompts = [tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True) + "<think>"
                   for x in roles]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        longest = max(replies[row][turn] for row in live)
        out = model.generate(
            inputs["input_ids"].to(model.device), attention_mask=inputs["attention_mask"].to(model.device),
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest,
            min_new_tokens=longest, pad_token_id=tokenizer.pad_token_id)
        tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:])


def padded_update(model, optimizer, batch, advantages, minibatch_size, micro_batch, seed=0):
    """One epoch with padded rows and full logits."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    for chosen in order.tensor_split(-(-len(batch) // minibatch_size)):
        weights = loss_weights(batch.loss_mask[chosen])
        for part in torch.arange(len(chosen)).split(micro_batch):
            rows = chosen[part]
            width = int(batch.lengths[rows].max())
            tokens, mask = batch.tokens[rows, :width], batch.loss_mask[rows, 1:width]
            padding = torch.arange(width, device=tokens.device) < batch.lengths[rows][:, None]
            logits = model(input_ids=tokens, attention_mask=padding.long(), use_cache=False).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
            loss, _ = policy_loss(logprobs, batch.logprobs[rows, 1:width], advantages[rows, 1:width], mask,
                                  weights=weights[part, 1:width])
            loss.backward()
        step_or_skip(optimizer)


def texts_of(batch, tokenizer, model) -> list[list[str]]:
    """Each row's dialogue as alternating user and assistant texts, decoded from its ids."""
    chat = ChatFormat(tokenizer, model)
    ending = len(chat.tail) + (0 if chat.opens_thought else len(chat.encode("<think>")))
    dialogues = []
    for ids, sampled, turns, length in zip(batch.tokens.tolist(), batch.loss_mask.tolist(),
                                           batch.turn_ids.tolist(), batch.lengths.tolist()):
        texts = []
        for turn in range(max(turns) + 1):
            here = [t for t in range(length) if turns[t] == turn]
            said = [ids[t] for t in here if sampled[t] and ids[t] not in chat.stop_ids]
            first = next(i for i, t in enumerate(here) if sampled[t])           # behind a reply may be a forced end
            lead = len(chat.head if turn == 0 else chat.between)
            texts += [chat.decode([ids[t] for t in here[lead:first - ending]]), "<think>" + chat.decode(said)]
        dialogues.append(texts)
    return dialogues


# --------------------------------------------------------------------------------------------- table

def measure(name: str, repeats: int, micro_batch: int, minibatch_size: int, turns: int = 0, tokens: int = 0):
    model, tokenizer = load_policy(name)
    device, shape = model.device, SHAPES.get(name, SHAPES["other"])
    rate = matmul_rate(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    shape = shape | {"turns": turns or shape["turns"], "tokens_a_pass": tokens or shape["tokens_a_pass"]}

    def ours():
        return update(model, optimizer, batch, advantages, minibatch_size=minibatch_size,
                      tokens_per_micro_batch=shape["tokens_a_pass"])
    times = {key: [] for key in ("rollout", "rollout_baseline", "update", "update_baseline")}
    model.generate(torch.tensor([[1, 2]], device=device), max_new_tokens=2, pad_token_id=0)     # warm
    for repeat in range(repeats + 1):                   # the first, with another seed, warms up
        with Counted(model) as through:
            seconds, batch = timed(lambda: play(model, tokenizer, shape, repeat), device)
        times["rollout"].append(seconds)
        dialogues = texts_of(batch, tokenizer, model)
        with Counted(model) as through_generate:
            seconds, _ = timed(lambda: generate_each_turn(model, tokenizer, batch, dialogues), device)
        times["rollout_baseline"].append(seconds)

        batch.rewards += torch.randn(batch.rewards.shape, device=device)        # so that no advantage is 0
        advantages, _ = compute_advantages("grpo", batch)
        with Counted(model) as packed:
            seconds, metrics = timed(ours, device)
        times["update"].append(seconds)
        with Counted(model) as padded:
            seconds, _ = timed(
                lambda: padded_update(model, optimizer, batch, advantages, minibatch_size, micro_batch), device)
        times["update_baseline"].append(seconds)
    rate = max(rate, matmul_rate(device))
    memory = {"update": peak_memory(ours, device)}
    memory["update_baseline"] = peak_memory(
        lambda: padded_update(model, optimizer, batch, advantages, minibatch_size, micro_batch), device)

    tokens, sampled = int(batch.lengths.sum()), int(batch.loss_mask.sum())
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    inner = sum(p.numel() for p in model.parameters()) - embedding * (1 if tied else 2)
    operations = 6 * inner * packed.tokens + 6 * embedding * sampled
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    ratio = {half: statistics.median(b / a for a, b in zip(times[half][1:], times[half + "_baseline"][1:]))
             for half in ("rollout", "update")}
    return {"model": name, "rows": len(batch), "trajectory_tokens": tokens, "sampled_tokens": sampled,
            "hidden_size": config.hidden_size, "tokens_a_pass": shape["tokens_a_pass"],
            "threads": torch.get_num_threads(), "device": str(device),
            "rollout_speedup": ratio["rollout"], "update_speedup": ratio["update"],
            "update_memory_ratio": memory["update"] / memory["update_baseline"],
            "matmul_share": operations / median["update"] / rate,
            "tokens_forwarded_per_token": through.tokens / tokens,
            "baseline_tokens_forwarded_per_token": through_generate.tokens / tokens,
            "update_tokens_forwarded_per_token": packed.tokens / tokens,
            "baseline_update_tokens_forwarded_per_token": padded.tokens / tokens,
            "ratio_max_dev": metrics["ratio_max_dev"], "matmul_gflops": rate / 1e9,
            "update_gflop": operations / 1e9,
            **{f"{key}_seconds": value for key, value in median.items()},
            **{f"{key}_peak_mib": value for key, value in memory.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, or a model folder")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro_batch", type=int, default=4, help="rows of a padded micro-batch")
    parser.add_argument("--minibatch_size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=0, help="turns an episode (0: as above)")
    parser.add_argument("--tokens_per_micro_batch", type=int, default=0, help="of ours (0: train.py's default)")
    parser.add_argument("--threads", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads or torch.get_num_threads())
    found = measure(flags.model, flags.repeats, flags.micro_batch, flags.minibatch_size, flags.turns,
                    flags.tokens_per_micro_batch)
    for key, value in found.items():
        print(f"{key:44s} {value if isinstance(value, (str, int)) else format(value, '.4g')}")
    if flags.json:
        Path(flags.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
