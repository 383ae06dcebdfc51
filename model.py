"""Models: load one, speak its chat format, give it a critic, save it.

Any causal language model of transformers with a chat template works: `load_policy` returns the model and
its tokenizer, `ChatFormat` cuts the template into the few id pieces that a dialogue is made of, so that a
rollout can append them and never has to render or encode a dialogue a second time.

RAGEN re-renders the whole dialogue as text every turn, encodes it again for training and finds the
assistant's tokens by counting control tokens. Text does not survive that trip: another split of the same
characters, a stripped thought or a cut action list make the trained ids differ from the sampled ones. Here
ids are appended, and the mask is known.

In reading order: load_policy, ChatFormat, Critic, save_checkpoint / load_trainer, and the built-in tiny
model (its tokenizer, its architecture), 1.1 M parameters that live in tiny/ and need no download.

    python model.py             # describes the tiny model and tokenizes a prompt
    python model.py --rebuild   # makes tiny/ again from nothing, by supervised training
"""
import argparse
import inspect
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()                              # one bar of our own is enough
TINY = Path(__file__).resolve().parent / "tiny"


# -------------------------------------------------------------------------------------------------- loading

def pick_device(device: str = "auto") -> torch.device:
    """"auto" takes CUDA, then Apple's MPS, then the CPU."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_policy(name: str = "tiny", device: str = "auto", dtype: str = "auto"):
    """Load a causal language model and its tokenizer.

    name: "tiny", a local folder or a hub id. device: "auto" or anything torch knows. dtype: what the
    forward pass computes in; "auto" is float32 on CPU and MPS and bfloat16 on CUDA. The weights themselves
    are float32 whatever the file holds: at the learning rates of RL, bfloat16 weights would round most
    updates away.

    Returns (model, tokenizer), the model in eval() mode: with dropout on, the probability ratio would not
    start at 1. Raises ValueError with one line when the folder or its chat template cannot be used. No
    remote code is run.
    """
    path = str(TINY) if name == "tiny" else name
    if name == "tiny" and not (TINY / "config.json").exists():
        raise ValueError(f"--model tiny: {TINY} holds no config.json (python model.py --rebuild makes it)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:          # whatever is in that folder, the flag is what to look at
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(f"--model {name}: neither 'tiny', nor a model folder, nor a hub id within reach "
                         f"({reason})") from None
    try:
        model = model.eval().to(pick_device(device))
    except (RuntimeError, AssertionError) as error:     # torch knows no such device, or has none
        raise ValueError(f"--device {device}: {str(error).splitlines()[0][:160]}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token   # only ever a filler behind a row's end: its mask is 0
    if dtype == "auto":
        dtype = "bfloat16" if model.device.type == "cuda" else "float32"
    if dtype != "float32":
        autocast_forward(model, getattr(torch, dtype))
    try:
        ChatFormat(tokenizer, model)                # an unusable template is refused now
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from None
    return model, tokenizer


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the backbone and the head compute in `dtype`. Wrapped here, once, so that rollout and update
    cannot differ."""
    for module in (model.base_model, model.get_output_embeddings()):
        module.forward = torch.autocast(model.device.type, dtype=dtype)(module.forward)


def context_length(model: nn.Module | None) -> int | None:
    """How many tokens a row may have, or None where the model sets no limit."""
    return None if model is None else getattr(model.config.get_text_config(), "max_position_embeddings", None)


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


# ---------------------------------------------------------------------------------------------- chat format

class ChatFormat:
    """The id pieces of a chat template, cut out once.

    A dialogue is  first(user text) + reply + [forced_end] + following(user text) + reply + ...  where
    `following` holds what the template puts between a reply's end token and the next reply. `end_id` is the
    template's end-of-turn token, `stop_ids` all ids that end a reply: it, and every end token that the
    tokenizer or the generation config declares.

    The pieces are found by rendering [user, reply, user] with dummy texts and cutting around the dummies. A
    template that does not render every turn alike is refused (ValueError). The environment's text is
    encoded with special tokens as plain text, so that an observation cannot end a turn or open another.
    """

    def __init__(self, tokenizer, model=None):
        self.tokenizer = tokenizer
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
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise ValueError(f"the chat template cannot be used: {reason}") from None
        if not stable:
            raise ValueError("the chat template cannot be used: it does not render every turn alike")

        declared = {tokenizer.eos_token_id}
        config = getattr(model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        declared |= set(ends) if isinstance(ends, (list, tuple)) else {ends}
        declared.discard(None)
        special = declared | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        between = self.encode(between, special=True)
        self.head, self.tail = self.encode(head, special=True), self.encode(tail, special=True)
        opener = [token for token in self.head if token in special][-1:]  # opens a turn: no end
        position = next((i for i, token in enumerate(between) if token in special), None)
        if position is None or [between[position]] == opener and between[position] not in declared:
            raise ValueError("the chat template cannot be used: no end token follows a reply")
        self.end_id = between[position]
        self.forced_end, self.between = between[:position + 1], between[position + 1:]
        self.stop_ids = declared | {self.end_id}
        self.has_bracket = {}
        self.opens_thought = tail.rstrip().endswith("<think>")      # some templates already open the thought

    def render(self, texts: list[str]) -> str:
        """Texts of user, assistant, user, ... as the template writes them, up to where the next reply
        begins."""
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        return self.tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a piece of text; special tokens written in it are plain text unless `special`."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]

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
    starts at zero (so the first values are 0 and the first GAE advantages are the plain returns)."""

    def __init__(self, policy_name: str, device: str = "auto", dtype: str = "auto"):
        super().__init__()
        model, _ = load_policy(policy_name, device, dtype)
        self.backbone = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.eval()


# ---------------------------------------------------------------------------------------------- checkpoints

def save_checkpoint(folder, model, tokenizer, critic=None, optimizers: dict | None = None,
                    state: dict | None = None) -> None:
    """Write an ordinary Hugging Face folder, plus the trainer's state, in one atomic step.

    optimizers: name -> torch optimizer. state: a JSON object (the next iteration and the like). A new
    folder is written beside the old one and renamed over it, so that a kill at any moment leaves one that
    is whole. Raises FloatingPointError, and writes nothing, when a weight is not finite: a broken model
    never replaces a good one.
    """
    folder = Path(folder)
    for module in (model, critic):
        if module is not None and not all(torch.isfinite(p).all() for p in module.parameters()):
            raise FloatingPointError(f"non-finite weights: {folder} keeps the last good checkpoint")
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    if critic is not None:
        save_file({k: v.contiguous() for k, v in critic.state_dict().items()}, new / "critic.safetensors")
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
    """The folder itself, or the one that an interrupted save left beside it. Raises ValueError when there
    is none."""
    folder = Path(folder)
    for path in (folder, folder.with_name(folder.name + ".old")):
        if (path / "trainer.json").exists():
            return path
    raise ValueError(f"no checkpoint in {folder.parent}")


def load_trainer(folder, critic=None, optimizers: dict | None = None) -> dict:
    """Put a checkpoint's critic and optimizer moments back; returns the trainer's state. Reads safetensors
    and JSON only."""
    folder = find_checkpoint(folder)
    if critic is not None:
        critic.load_state_dict(load_file(folder / "critic.safetensors"))
    moments = load_file(folder / "optimizers.safetensors")
    for name, optimizer in (optimizers or {}).items():
        whole = optimizer.state_dict()
        for key, value in moments.items():
            owner, index, slot = key.split(".", 2)
            if owner == name:
                whole["state"].setdefault(int(index), {})[slot] = value
        optimizer.load_state_dict(whole)
    return json.loads((folder / "trainer.json").read_text())


# -------------------------------------------------------------------------------------- built-in tiny model

TINY_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
                 "{{ message['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

# A token is three cells of a grid row (a short row shows the model where in it a thing stands), a word with
# its blank, a digit, "||", or any other character by itself.
TINY_SPLIT = r"[#_OXPS√G]{3}| ?[A-Z]?[a-z]+| ?\|\|| ?[0-9]|[^\S\n]+|\n|."


def tiny_tokenizer(texts, vocab_size: int = 704) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges are learned from `texts`: the words of the games are one
    token each, and any other text still has ids, byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(TINY_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags), special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TINY_TEMPLATE, clean_up_tokenization_spaces=False)


def tiny_model(vocab_size: int, seed: int = 0) -> LlamaForCausalLM:
    """The tiny model's architecture with random weights: a Llama with one key/value head and tied
    embeddings."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab_size, hidden_size=128, intermediate_size=352, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=1, head_dim=32, max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 200.0},      # dialogues are short
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0)).eval()


# Supervised phases of the warm start. First every dialogue is careful, so that the model learns to see and
# to plan; then only a part is, and what it learns is that there are several ways to think: which of them
# pays is left to RL.
RECIPE = (dict(iters=1300, lr=2e-3, careful=1.0), dict(iters=300, lr=6e-4, careful=1.0),
          dict(iters=200, lr=4e-4, careful=0.3), dict(iters=80, lr=1e-4, careful=0.3))


def rebuild(folder: Path = TINY) -> None:
    """Make the tiny model from nothing, within an hour on two cores, and print how well it plays."""
    import envs
    import train
    work = Path("runs") / "rebuild"
    shutil.rmtree(work, ignore_errors=True)

    def texts():
        """What the tokenizer learns from: prompts, demonstrations and grids of the three games (never a
        variant)."""
        dice = random.Random(0)
        for seed, name in itertools.product(range(2000), ("bandit", "sokoban", "frozenlake")):
            env = envs.make_env(name)
            observation, _ = env.reset(900_000_000 + seed)
            yield observation
            if seed < 300:
                yield "user\nassistant\nsystem\n" + envs.first_prompt(env, observation, think=seed % 2 == 0)
                yield envs.next_prompt(env, observation, dice.uniform(-1, 11), seed % 2 == 0, 2 + seed % 4,
                                       seed % 10)
                yield env.demonstrate(dice, careful=seed % 2 == 0)
            for action in dice.choices(env.actions, k=4):
                yield env.step(action)[0]

    tokenizer = tiny_tokenizer(texts())
    model = tiny_model(len(tokenizer))
    save_checkpoint(work / "start", model, tokenizer)
    source, games = work / "start", ",".join(["sokoban"] * 6 + ["frozenlake", "bandit"])
    for number, phase in enumerate(RECIPE):
        out = work / f"phase{number}"
        train.main(f"--algo sft --model {source} --env {games} --groups 1 --group_size 24 --dtype bfloat16 "
                   f"--out {out} --eval_every 0 --eval_n 64 --eval_split tune --seed {100 + number} "
                   "--max_new_tokens 80".split()
                   + [f"--{name}={value}" for name, value in phase.items()])
        source = out / "checkpoint"
    model, tokenizer = load_policy(str(source))
    model.to(torch.bfloat16).save_pretrained(folder)        # half the size; loaded as float32
    tokenizer.save_pretrained(folder)


def describe() -> None:
    """Print what the tiny model is, and how it sees a prompt."""
    from envs import first_prompt, make_env
    model, tokenizer = load_policy("tiny")
    chat, env = ChatFormat(tokenizer, model), make_env("sokoban")
    observation, _ = env.reset(0)
    ids = chat.first(first_prompt(env, observation)) + chat.encode("<think>")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{model.config.model_type}, {parameters:,} parameters, {len(tokenizer)} tokens\n"
          f"hidden {model.config.hidden_size}, layers {model.config.num_hidden_layers}, query heads "
          f"{model.config.num_attention_heads}, key/value heads {model.config.num_key_value_heads}\n"
          f"end token {tokenizer.decode([chat.end_id])}; a Sokoban prompt is {len(ids)} tokens:\n")
    print("|".join(tokenizer.decode([i]) for i in ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Describe the built-in tiny model, or make it again.")
    parser.add_argument("--rebuild", action="store_true", help="train tiny/ from nothing, within an hour")
    rebuild() if parser.parse_args().rebuild else describe()
