"""How the weights beside this file were made: python model.py --rebuild, within an hour on two cores."""
import itertools
import random
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import envs
import train
from model import TINY, ChatFormat, load_policy, save_checkpoint

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
    model, tokenizer = load_policy("tiny")
    chat, env = ChatFormat(tokenizer, model), envs.make_env("sokoban")
    observation, _ = env.reset(0)
    ids = chat.first(envs.first_prompt(env, observation)) + chat.encode("<think>")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{model.config.model_type}, {parameters:,} parameters, {len(tokenizer)} tokens\n"
          f"hidden {model.config.hidden_size}, layers {model.config.num_hidden_layers}, query heads "
          f"{model.config.num_attention_heads}, key/value heads {model.config.num_key_value_heads}\n"
          f"end token {tokenizer.decode([chat.end_id])}; a Sokoban prompt is {len(ids)} tokens:\n")
    print("|".join(tokenizer.decode([i]) for i in ids))
