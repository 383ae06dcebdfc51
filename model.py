"""Models: load one, speak its chat format, give it a critic, save it.

Any causal language model of transformers with a chat template works: `load_policy` returns the model and
its tokenizer, `ChatFormat` cuts the template into the few id pieces that a dialogue is made of, so that a
rollout can append them and never has to render or encode a dialogue a second time.

RAGEN re-renders the whole dialogue as text every turn, encodes it again for training and finds the
assistant's tokens by counting control tokens. Text does not survive that trip: another split of the same
characters, a stripped thought or a cut action list make the trained ids differ from the sampled ones. Here
ids are appended, and the mask is known.

In reading order: read_model, load_policy, LoRA, ChatFormat, Critic, save_checkpoint / load_trainer, the run
folder, memory_plan. The built-in tiny model lives in tiny/ (1.1 M parameters; tiny/rebuild.py made it).

    python model.py             # describes the tiny model and tokenizes a prompt
    python model.py --rebuild   # makes tiny/ again from nothing, by supervised training
"""
import argparse
import inspect
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.nn.functional import linear
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()                              # one bar of our own is enough
TINY = Path(__file__).resolve().parent / "tiny"


# -------------------------------------------------------------------------------------------------- loading

def pick_device(device: str = "auto") -> torch.device:
    """"auto" takes CUDA, then Apple's MPS, then the CPU."""
    if device == "auto":
        device = ("cuda" if torch.cuda.is_available() else
                  "mps" if torch.backends.mps.is_available() else "cpu")
    return torch.device(device)


def join_ranks() -> None:
    """Under torchrun: find the other processes. All but rank 0 are silent."""
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if distributed.get_rank():
            sys.stdout = open(os.devnull, "w")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def read_model(name: str = "tiny", lora_rank: int = 0):
    """Read all of a model but its weights: what cannot work is said before gigabytes are loaded.

    name as in load_policy. Returns (model, tokenizer); the model is on torch's meta device: shapes, no
    numbers. Of its generation config only the end tokens are kept: the rest has no say in RL, and
    transformers refuses to save some. No remote code is run. Raises ValueError with one line.
    """
    path = str(TINY) if name == "tiny" else name
    if name == "tiny" and not (TINY / "config.json").exists():
        raise ValueError(f"--model tiny: {TINY} holds no config.json (python model.py --rebuild makes it)")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        declared = {"eos_token_id": getattr(config.get_text_config(), "eos_token_id", None)}
        declared |= json.loads(Path(file).read_text()) if file else {}
    except Exception as error:          # whatever is in that folder, the flag is what to look at
        raise ValueError(f"--model {name}: neither 'tiny', nor a model folder, nor a hub id within reach "
                         f"({first_line(error)})") from None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token    # a filler behind a row's end, masked
    try:
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} is an encoder-decoder, not a causal language model")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.generation_config = GenerationConfig(
            eos_token_id=declared["eos_token_id"], bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id)
        highest, rows = ChatFormat(tokenizer, model).highest_id(), len(model.get_input_embeddings().weight)
        if highest >= rows:
            raise ValueError(f"the tokenizer has ids up to {highest}, the model's embedding {rows} rows")
        if lora_rank:
            add_lora(model, lora_rank)
    except Exception as error:          # transformers' own message where it has no such model
        raise ValueError(f"--model {name}: {first_line(error)}") from None
    return model, tokenizer


def load_policy(name: str = "tiny", device: str = "auto", dtype: str = "auto", lora_rank: int = 0):
    """Load a causal language model and its tokenizer.

    name: "tiny", a local folder or a hub id. device: "auto" or anything torch knows. dtype: what the
    forward pass computes in; "auto" is float32 on CPU and MPS and bfloat16 on CUDA. The weights themselves
    are float32 whatever the file holds: at the learning rates of RL, bfloat16 weights would round most
    updates away. lora_rank: 0 trains all weights, else see add_lora.

    Returns (model, tokenizer), the model in eval() mode: with dropout on, the probability ratio would not
    start at 1. Raises ValueError with one line, of read_model, or when weights or device cannot be used.
    """
    shape, tokenizer = read_model(name)
    try:
        place = torch.empty(0, device=pick_device(device)).device
    except (RuntimeError, AssertionError) as error:     # torch knows no such device, or has none
        raise ValueError(f"--device {device}: {first_line(error)}") from None
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            shape.name_or_path, config=shape.config, generation_config=shape.generation_config,
            dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        raise ValueError(f"--model {name}: its weights cannot be loaded ({first_line(error)})") from None
    if report["missing_keys"]:          # transformers would go on with random numbers
        raise ValueError(f"--model {name}: its files lack the weights {sorted(report['missing_keys'])[0]} "
                         f"and {len(report['missing_keys']) - 1} more")
    if lora_rank:
        add_lora(model, lora_rank)
    model = model.eval().to(place)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if dtype != "float32":
        autocast_forward(model, getattr(torch, dtype))
    return model, tokenizer


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the backbone and the head compute in `dtype`. Wrapped here, once, so that rollout and update
    cannot differ."""
    for module in (model.base_model, model.get_output_embeddings()):
        module.forward = torch.autocast(model.device.type, dtype=dtype)(module.forward)


def context_length(model: nn.Module | None) -> int | None:
    """How many tokens a row may have, or None where the model sets no limit."""
    config = None if model is None else model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}       # longrope (Phi) scores longer rows otherwise
    name = "original_" * (rope.get("rope_type") == "longrope") + "max_position_embeddings"
    return rope.get(name) or getattr(config, name, None)


def next_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits (n, V) in float32 of last hidden states (n, D): the head, and what some models do behind it."""
    logits, config = model.get_output_embeddings()(hidden).float(), model.config.get_text_config()
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)                # Granite
    cap = getattr(config, "final_logit_softcapping", None)                            # Gemma 2
    return torch.tanh(logits / cap) * cap if cap else logits


def cache_argument(model: nn.Module) -> str:
    """The name under which the backbone takes a KV cache: "cache" in newer releases, "past_key_values"
    before."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


# ----------------------------------------------------------------------------------------------------- LoRA

LORA_ALPHA = 64         # RAGEN's, which uses rank 64: there the change is B A, unscaled


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable change of low rank (arXiv 2106.09685):

        y = W x + b + scale * B A x        scale = alpha / rank

    A (rank, in) is random, B (out, rank) zero at first."""

    def __init__(self, base: nn.Module, rank: int, generator: torch.Generator):
        super().__init__()
        self.base, self.scale, self.transposed = base, LORA_ALPHA / rank, isinstance(base, Conv1D)    # GPT-2
        n_out, n_in = base.weight.T.shape if self.transposed else base.weight.shape
        start = torch.randn(rank, n_in, generator=generator) / n_in ** 0.5
        self.A = nn.Parameter(start.to(base.weight))
        self.B = nn.Parameter(base.weight.new_zeros(n_out, rank))

    def forward(self, x):
        return self.base(x) + linear(linear(x, self.A), self.B) * self.scale

    def merged(self) -> torch.Tensor:
        """The weight of the one linear layer that computes the same."""
        change = self.B @ self.A * self.scale
        return self.base.weight + (change.T if self.transposed else change)


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model and give every linear layer of its blocks (attention and MLP) a LoRA of this rank, in
    place. It computes what it did until the first step; embeddings, norms, head stay as they are. rank: 8 to
    64 (paper, appendix D: 64, at ten times the learning rate). Raises ValueError if no layer is linear."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)        # its own: global random state stays untouched
    for name, layer in list(model.base_model.named_modules()):
        if isinstance(layer, (nn.Linear, Conv1D)):
            model.base_model.set_submodule(name, LoRA(layer, rank, generator))
    if not has_lora(model):
        raise ValueError(f"--lora_rank {rank}: a {type(model).__name__} has no linear layers to change")


def trainable(module: nn.Module) -> dict:
    """Name -> parameter of what an optimizer changes: with LoRA the factors (and a critic's head)."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def has_lora(model: nn.Module) -> bool:
    """Whether add_lora has changed this model."""
    return any(isinstance(layer, LoRA) for layer in model.modules())


def merged_weights(model: nn.Module) -> dict:
    """The state dict of the plain architecture, every LoRA merged into its layer; the model is untouched."""
    weights = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA):
            del weights[f"{name}.A"], weights[f"{name}.B"], weights[f"{name}.base.weight"]
            weights[f"{name}.weight"] = layer.merged().detach()
            if layer.base.bias is not None:
                weights[f"{name}.bias"] = weights.pop(f"{name}.base.bias")
    return weights


# ---------------------------------------------------------------------------------------------- chat format

# Some templates (Llama 3.2) write today's date; this goes before them, as a run must not depend on the day.
SAME_DAY = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro +%}"


class ChatFormat:
    """The id pieces of a chat template, cut out once.

    A dialogue is  first(user text) + reply + [forced_end] + following(user text) + reply + ...  where
    `following` holds what the template puts between a reply's end token and the next reply. `end_id` is the
    template's end-of-turn token, `stop_ids` all ids that end a reply: it, and every end token that the
    tokenizer or the generation config declares.

    The pieces are found by rendering [user, reply, user] with dummy texts and cutting around the dummies. A
    template that does not render every turn alike is refused (ValueError). The environment's text is
    encoded with special tokens as plain text, so that an observation cannot end a turn or open another.
    think: what a template that asks is told; without, some (Qwen3) put an empty thought before a reply.
    """

    def __init__(self, tokenizer, model=None, think: bool = True):
        self.tokenizer, self.think = tokenizer, think
        user, reply, later, reply2, last = (f"Dummy{i}text" for i in range(5))
        try:
            short = self.render([user])
            long = self.render([user, reply, later])
            head, rest = long.split(user)
            opening, rest = rest.split(reply)           # what a past reply is preceded by
            between, tail = rest.split(later)           # tail: from the user's text to where a reply begins
            stable = short == head + user + tail and self.render([user, reply, later, reply2, last]) == (
                head + user + opening + reply + between + later + opening + reply2 + between + last + tail)
        except Exception as error:                      # templates are programs: anything may come out
            raise ValueError(f"the chat template cannot be used: {first_line(error)}") from None
        if not stable:
            raise ValueError("the chat template cannot be used: it does not render every turn alike")

        declared = {tokenizer.eos_token_id}
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        declared |= set(ends) if isinstance(ends, (list, tuple)) else {ends}
        declared.discard(None)
        special = declared | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        between, self.tail = self.encode(between, special=True), self.encode(tail, special=True)
        self.head = tokenizer(head, add_special_tokens=False)["input_ids"]      # alone begins a text
        opener = [token for token in self.head if token in special][-1:]  # opens a turn: no end
        position = next((i for i, token in enumerate(between) if token in special), None)
        if position is None or [between[position]] == opener and between[position] not in declared:
            raise ValueError("the chat template cannot be used: no end token follows a reply")
        self.end_id = between[position]
        self.forced_end, self.between = between[:position + 1], between[position + 1:]
        self.roles = [x.content for i, x in tokenizer.added_tokens_decoder.items() if not x.special and
                      i in {*self.head, *between, *self.tail} and "think>" not in x.content]    # DeepSeek's
        self.stop_ids = declared | {self.end_id}
        self.has_bracket = {}
        self.opens_thought = tail.rstrip().endswith("<think>")      # some templates already open the thought

    def render(self, texts: list[str]) -> str:
        """Texts of user, assistant, user, ... as the template writes them, up to the next reply."""
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        return self.tokenizer.apply_chat_template(
            roles, tokenize=False, add_generation_prompt=True, enable_thinking=self.think,
            chat_template=SAME_DAY + self.tokenizer.get_chat_template())

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a piece of text; special tokens written in it are plain text unless `special`. Tokenizers
        of the SentencePiece kind put a blank before what they take for the start of a text, so the piece is
        encoded behind a newline, which is then cut off."""
        options = dict(add_special_tokens=False, split_special_tokens=not special)
        plain = lambda text: self.tokenizer(text, **options)["input_ids"]
        for role in () if special else self.roles:          # tokenizers do not split these
            text = text.replace(role, f"{role[0]} {role[1:]}")
        newline, whole = plain("\n"), plain("\n" + text)
        return whole[len(newline):] if whole[:len(newline)] == newline else plain(text)

    def highest_id(self) -> int:
        """The highest id that a dialogue can have: of special tokens, only the template's own get into it."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        ordinary = set(self.tokenizer.get_vocab().values()) - special
        return max(ordinary | {*self.head, *self.tail, *self.between, *self.forced_end})

    def first(self, text: str) -> list[int]:
        """Ids from the dialogue's start to where the first reply begins."""
        return self.head + self.encode(text) + self.tail

    def following(self, text: str) -> list[int]:
        """Ids from behind a reply's end token to where the next reply begins."""
        return self.between + self.encode(text) + self.tail

    def closes_tag(self, token: int) -> bool:
        """Whether the id's text has a ">": only then can it complete an </answer>, and only then is a reply
        decoded."""
        if token not in self.has_bracket:
            self.has_bracket[token] = ">" in self.decode([token])
        return self.has_bracket[token]

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, special tokens shown, nothing tidied up."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# --------------------------------------------------------------------------------------------------- critic

class Critic(nn.Module):
    """A value function: a backbone of its own, started from the policy's weights, and a scalar head that
    starts at zero (so the first values are 0 and the first GAE advantages are the plain returns). With LoRA
    the head is still trained in full."""

    def __init__(self, policy_name: str, device: str = "auto", dtype: str = "auto", lora_rank: int = 0):
        super().__init__()
        model, _ = load_policy(policy_name, device, dtype, lora_rank)
        self.backbone = model.base_model
        width = model.config.get_text_config().hidden_size      # skip_init: no draw from the global state
        self.head = nn.utils.skip_init(nn.Linear, width, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.eval()


# ---------------------------------------------------------------------------------------------- checkpoints

def save_checkpoint(folder, model, tokenizer, critic=None, optimizers: dict | None = None,
                    state: dict | None = None) -> None:
    """Write an ordinary Hugging Face folder, plus the trainer's state, in one atomic step.
    optimizers: name -> torch optimizer. state: a JSON object (the next iteration and the like). With LoRA
    the folder's weights are the merged ones, and the factors lie beside them, to resume from. A new folder
    is written beside the old one and renamed over it, so that a kill at any moment leaves one that is
    whole. Raises FloatingPointError, and writes nothing, when a weight is not finite."""
    folder, weights = Path(folder), merged_weights(model)       # a non-finite factor spoils its product
    heads = [] if critic is None else critic.parameters()
    if not all(torch.isfinite(x).all() for x in (*weights.values(), *heads)):
        raise FloatingPointError(f"non-finite weights: {folder} keeps the last good checkpoint")
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new, state_dict=weights)
    tokenizer.save_pretrained(new)
    for name, module in (("critic", critic), ("lora", model if has_lora(model) else None)):
        if module is not None:
            save_file({key: p.detach().contiguous() for key, p in trainable(module).items()},
                      new / f"{name}.safetensors")
    moments = {}
    for name, optimizer in (optimizers or {}).items():
        for index, slots in optimizer.state_dict()["state"].items():
            moments |= {f"{name}.{index}.{slot}": torch.as_tensor(value).contiguous()
                        for slot, value in slots.items()}
    save_file(moments, new / "optimizers.safetensors")
    (new / "trainer.json").write_text(json.dumps(state or {}, indent=1))
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)                          # until here `old` is the good one: find_checkpoint
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder) -> Path:
    """The folder itself, or the one that an interrupted save left beside it. Raises ValueError if none is."""
    folder = Path(folder)
    for path in (folder, folder.with_name(folder.name + ".old")):
        if (path / "trainer.json").exists():
            return path
    raise ValueError(f"no checkpoint in {folder.parent}")


def load_trainer(folder, critic=None, optimizers: dict | None = None, model=None) -> dict:
    """Put a checkpoint's critic, optimizer moments and, where `model` has them, LoRA factors back; returns
    the trainer's state. Reads safetensors and JSON only.

    load_policy loads a policy without LoRA from the folder, but one with LoRA from where it started: the
    folder's weights are merged, and no factor can be taken out of a sum again.
    """
    folder = find_checkpoint(folder)
    for name, module in (("critic", critic), ("lora", model if model and has_lora(model) else None)):
        if module is not None:
            stored = load_file(folder / f"{name}.safetensors")
            for key, p in trainable(module).items():
                p.data.copy_(stored[key])
    moments = load_file(folder / "optimizers.safetensors")
    for name, optimizer in (optimizers or {}).items():
        whole = optimizer.state_dict() | {"state": {}}
        for key, value in moments.items():
            owner, index, slot = key.split(".", 2)
            if owner == name:
                whole["state"].setdefault(int(index), {})[slot] = value
        optimizer.load_state_dict(whole)
    return json.loads((folder / "trainer.json").read_text())


# ------------------------------------------------------------------------------------------ what a run needs

class Interrupt:
    """Ctrl-C: the iteration at hand can be finished and saved; a second one stops at once."""
    asked = False

    def during(self, iterations):
        """Yield the iterations; behind the loop, Ctrl-C means what it meant before."""
        before = signal.signal(signal.SIGINT, self.ask)
        try:
            yield from iterations
        finally:
            signal.signal(signal.SIGINT, before)

    def ask(self, number, frame):
        print("Ctrl-C: stopping after this iteration (again: at once, without saving)")
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Clock(Counter):
    """Seconds by what they were spent on: `with clock("rollout"): ...`."""

    @contextmanager
    def __call__(self, name: str):
        self[name] -= time.perf_counter()
        yield
        self[name] += time.perf_counter()


class Run:
    """A run folder. Ranks but 0 write where nobody reads. columns: metric -> its name on the screen."""

    def __init__(self, config: dict, columns: dict, rank: int = 0):
        self.folder, self.rank = Path(tempfile.mkdtemp() if rank else config["out"]), rank
        self.config, self.columns, self.began, self.first = config, columns, time.perf_counter(), {}
        self.metrics, self.rows = self.folder / "metrics.jsonl", []
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        self.write("config.json", json.dumps(config, indent=1))

    def write(self, name: str, text: str) -> None:
        """Write a file in one step: a kill leaves the old one or the new one."""
        (self.folder / f"{name}.new").write_text(text)
        os.replace(self.folder / f"{name}.new", self.folder / name)

    def log(self, iteration: int, metrics: dict, seconds: float, texts: list[str]) -> None:
        """A line of metrics.jsonl and one on the screen; every ten iterations the texts of some dialogues."""
        row = {"iter": iteration + 1, **metrics, "seconds": round(seconds, 3)}
        row = {key: x for key, x in row.items() if x != "" and (not isinstance(x, float) or math.isfinite(x))}
        self.rows.append(row)
        with open(self.metrics, "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if iteration == 0 or (iteration + 1) % 10 == 0:
            (self.folder / "samples" / f"{iteration + 1:05d}.txt").write_text(f"\n{'=' * 80}\n".join(texts))
        cells = "  ".join(f"{label} {row[key]:6.3f}" for key, label in self.columns.items() if key in row)
        tqdm.write(f"{iteration + 1:4d}/{self.config['iters']}  {cells}  {seconds:5.1f} s")
        if "echo_trap" in row:
            back = f"; back to iteration {row['rolled_back_to']}" if "rolled_back_to" in row else ""
            tqdm.write(f"echo trap: {row['echo_trap']}{back}")

    def save(self, iteration: int, model, tokenizer, critic, optimizers: dict, healthy=False) -> None:
        """Checkpoint after `iteration` iterations; healthy: keep it in healthy/, too, to roll back to."""
        for name in ["checkpoint"] + ["healthy"] * bool(healthy) if not self.rank else ():
            try:
                save_checkpoint(self.folder / name, model, tokenizer, critic, optimizers,
                                {"iteration": iteration, **self.first})
            except FloatingPointError as error:
                sys.exit(f"train.py: {error}")

    def good(self) -> str:
        """Where the last good weights are, in words."""
        there = [x for x in map(Path(self.config["out"]).joinpath, ("healthy", "checkpoint")) if x.exists()]
        return f"the last good weights are in {there[0]}" if there else "nothing was saved yet"

    def restore(self, folder: str, model, critic, optimizers: dict) -> int:
        """Take up the state saved in a run folder (the weights are loaded) -> the iteration to go on from."""
        state = load_trainer(Path(folder) / "checkpoint", critic, optimizers, model)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines(keepends=True)[:state["iteration"]]
        self.write("metrics.jsonl", "".join(lines))                                        # one an iteration
        self.rows = [json.loads(line) for line in lines]
        return state["iteration"]

    def rollback(self, model, critic, optimizers: dict) -> int:
        """Put weights and moments of healthy/ back -> the iteration it was saved after. All ranks read it."""
        folder = find_checkpoint(Path(self.config["out"]) / "healthy")
        if not has_lora(model):         # with LoRA load_trainer puts the factors back
            model.load_state_dict(load_policy(str(folder), "cpu", "float32")[0].state_dict())
        return load_trainer(folder, critic, optimizers, model)["iteration"]

    def rollbacks(self) -> int:
        """How often this run has gone back."""
        return sum("rolled_back_to" in row for row in self.rows)


def memory_plan(model: nn.Module, *, rows: int, turns: int, max_new_tokens: int, shown_tokens: int,
                critic: bool = False, reference: bool = False, cache_bytes: int = 4) -> dict:
    """What an iteration takes at most: counts (int) and memory in GiB (float), by what it is for.

    model: of read_model, with add_lora where LoRA is wanted; no weights are needed. rows: episodes an
    iteration. shown_tokens: what one episode is shown, headers and observations of all its turns.
    cache_bytes: a number's in the KV cache, 2 in bfloat16; all else is float32. The cache may grow half as
    large again, and activations come on top (tokens_per_micro_batch bounds them).
    """
    config = model.config.get_text_config()
    count = lambda parameters: sum(p.numel() for p in parameters)
    weights, trained = count(model.parameters()), count(trainable(model).values())
    longest = min(shown_tokens + turns * max_new_tokens, context_length(model) or 1 << 60)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plan = {"parameters": weights, "trained": trained, "tokens shown, a row": min(shown_tokens, longest),
            "tokens sampled, a row": min(turns * max_new_tokens, longest),
            "tokens, an iteration": rows * longest}
    numbers = {"weights": weights, "gradients": trained, "optimizer": 2 * trained}
    if critic:                          # a second backbone, and a scalar head; each like the policy's
        backbone, head = model.base_model, config.hidden_size + 1
        numbers["critic"] = count(backbone.parameters()) + 3 * count(trainable(backbone).values()) + 4 * head
    if reference:
        numbers["reference"] = weights - trained * has_lora(model)      # without LoRA
    memory = {name: 4 * n / 2**30 for name, n in numbers.items()}
    slots = rows * longest * config.num_hidden_layers
    memory["KV cache"] = slots * kv_heads * head_dim * 2 * cache_bytes / 2**30
    return plan | memory | {"together": sum(memory.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Describe the built-in tiny model, or make it again.")
    parser.add_argument("--rebuild", action="store_true", help="train tiny/ from nothing, within an hour")
    run_path(str(TINY / "rebuild.py"))["rebuild" if parser.parse_args().rebuild else "describe"]()
