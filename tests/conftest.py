"""What tests/test_rollout.py, test_model.py and test_train.py share: micro models, tokenizers, a model whose every id
is dictated, a small game, and an independent loop that scores a row one id at a time."""
import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"      # the tests need no network
import random
import re
import sys
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen3Config)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
import rollout  # noqa: E402
from model import ChatFormat  # noqa: E402
from tiny.rebuild import tiny_tokenizer  # noqa: E402

torch.set_num_threads(1)
TINY = ROOT / "tiny"


# --------------------------------------------------------------------------------------------------- tokenizers

@lru_cache
def corpus() -> tuple:
    texts, dice = [], random.Random(0)
    for seed in range(12):
        for name in ("bandit", "sokoban", "frozenlake"):
            env = envs.make_env(name)
            obs, _ = env.reset(seed)
            texts += ["user\nassistant\nsystem\n" + envs.first_prompt(env, obs), env.demonstrate(dice, True)] * 2
    return tuple(texts)


def micro_tokenizer(template=None, specials=(), eos=None, pad=True, vocab_size=480):
    """The tiny model's kind of tokenizer, learned from a few prompts; with a template, special tokens and an end token
    of one's own."""
    tokenizer = tiny_tokenizer(corpus(), vocab_size)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials], special_tokens=True)
    if template is not None:
        tokenizer.chat_template = template
    if eos is not None:
        tokenizer.eos_token = eos
    if not pad:
        tokenizer.pad_token = None
    return tokenizer


@pytest.fixture(scope="session")
def tok():
    return micro_tokenizer()


# ------------------------------------------------------------------------------------------------------- models

# What a micro model likes to say after what: enough for valid, malformed, stopped and endless replies alike.
HABITS = (("<think>", "</think>"), ("<think>", " I"), (" I", "</think>"), ("</think>", "<answer>"),
          ("<answer>", " Up"), ("<answer>", " Down"), ("<answer>", " Left"), ("<answer>", "Phoenix"),
          ("<answer>", "Dragon"), (" I", "<|im_end|>"), (" Up", " ||"), (" ||", " Down"),
          *((name, "</answer>") for name in (" Up", " Down", " Left", "Phoenix", "Dragon")))


def with_habits(model, tokenizer, seed=0, strength=11.0):
    """Random weights, but for the head: after the first id of a pair of HABITS it favours the second. Ids beyond the
    tokenizer's (if any) would be likely everywhere."""
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"][0]
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(head.weight.shape, generator=generator)
    weight = torch.randn(head.weight.shape, generator=generator) * 0.05
    for before, after in HABITS:
        direction = embeddings[ids(before)] - embeddings[ids(before)].mean()
        weight[ids(after)] += strength * direction / direction.square().sum()
    weight[len(tokenizer):] *= 40
    model.get_input_embeddings().weight.data, head.weight.data = embeddings, weight
    return model.eval()


def micro_llama(tokenizer, seed=0, extra=0, **changes):
    """`extra`: more logits than the tokenizer has ids."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.08)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer) + extra, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **{**config, **changes}))
        return with_habits(model, tokenizer, seed)


def micro_gpt2(tokenizer, seed=0):
    """A table of absolute positions, and much dropout in the config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=1400,
            resid_pdrop=0.4, embd_pdrop=0.4, attn_pdrop=0.4, initializer_range=0.08, tie_word_embeddings=False,
            bos_token_id=2, eos_token_id=2))
        return with_habits(model, tokenizer, seed)


class Backbone(nn.Module):
    """Sees what an attention layer would see: it stores ids and positions as keys in the cache it is given, takes from
    the mask which slots each query may look at, and says the id that `say` names for that context."""

    def __init__(self, say, vocab):
        super().__init__()
        self.say, self.vocab, self.fed = say, vocab, []
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, position_ids, attention_mask, cache, use_cache=True):
        stored = torch.stack([input_ids, position_ids], -1)[:, None].float()               # (n, 1, m, 2)
        keys, _ = cache.update(stored, stored, 0)
        hidden = torch.zeros(*input_ids.shape, self.vocab)
        for row, query in product(*map(range, input_ids.shape)):
            visible = attention_mask[row, 0, query] == 0
            context, positions = keys[row, 0, visible].long().T.tolist()
            self.fed.append((tuple(context), tuple(positions), int(position_ids[row, query])))
            hidden[row, query, self.say(context)] = 60.0
        return SimpleNamespace(last_hidden_state=hidden)


class Oracle(nn.Module):
    """A causal language model that says, after each context, the id that say(context) names; nothing else is likely."""

    def __init__(self, say, tokenizer, max_context=100_000, ends=None):
        super().__init__()
        self.base_model = Backbone(say, len(tokenizer))
        self.config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=max_context)
        self.generation_config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id if ends is None else ends)
        self.head = nn.Identity()
        self.device = torch.device("cpu")

    def get_output_embeddings(self):
        return self.head

    @property
    def fed(self):
        return self.base_model.fed


def oracle(tokenizer, replies, think=True, filler="x", **options):
    """An Oracle that plays `replies`: (level, turn) -> list of ids or text, from the game Walk below; once a reply's
    ids are used up it says `filler` for ever, so that only a limit ends it."""
    chat = ChatFormat(tokenizer)
    opening = [*chat.tail, *([] if think and chat.opens_thought else chat.encode(envs.opening_tag(think)))]
    more = chat.encode(filler)[0]

    def say(context):
        starts = [i + len(opening) for i in range(len(context) - len(opening) + 1)
                  if context[i:i + len(opening)] == opening]
        text = tokenizer.decode(context)
        level, turn = re.findall(r"level (\d+)", text), re.findall(r"Turn (\d+) of", text)
        if not (starts and level and turn):
            return more
        reply = replies(int(level[-1]), int(turn[-1]))
        ids, said = chat.encode(reply, special=True) if isinstance(reply, str) else reply, len(context) - starts[-1]
        return ids[said] if said < len(ids) else more

    return Oracle(say, tokenizer, **options)


# --------------------------------------------------------------------------------------------------- a small game

class Walk(envs.Env):
    """Shows its level and what was taken; an action pays 1 + level / 100; Left and Right end it, Right as a success."""
    actions, rules = ("Up", "Down", "Left", "Right"), "Walk."
    max_turns, max_actions_per_turn, max_actions = 4, 2, 100
    extra = ""
    settings = envs.Env.settings | {"extra": ""}

    def start(self, seed):
        self.level, self.taken = seed, []

    def render(self):
        return f"{self.extra}{' '.join(self.taken)} level {self.level}"

    def act(self, action):
        self.taken.append(action)
        self.success = action == "Right"
        return 1 + self.level / 100, action in ("Left", "Right")


# ---------------------------------------------------------------------------------------------- independent loops

def slow_scores(model, ids, sampled, temperature=1.0, vocab=None):
    """log-prob and entropy of every sampled id of one row, by the whole model on the plain row (no cache, no mask,
    no padding), in float64 after the logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()[:, :vocab] / temperature
    logprobs, entropies = torch.zeros(len(ids)), torch.zeros(len(ids))
    for t, drawn in enumerate(sampled):
        if drawn:
            p = torch.softmax(logits[t - 1], -1)
            logprobs[t], entropies[t] = p[ids[t]].log(), -(p * p.clamp(min=1e-300).log()).sum()
    return logprobs, entropies


def rows_of(batch):
    """A Trajectories as plain lists, one dict a row, without padding."""
    out = []
    for b, n in enumerate(batch.lengths.tolist()):
        turns = len(batch.infos[b]["turns"])
        assert (batch.turn_ids[b, n:] == -1).all() and not batch.loss_mask[b, n:].any()
        assert (batch.turn_ids[b, :n] >= 0).all()
        out.append(dict(
            ids=batch.tokens[b, :n].tolist(), mask=batch.loss_mask[b, :n].int().tolist(),
            turn=batch.turn_ids[b, :n].tolist(), logprobs=batch.logprobs[b, :n], entropies=batch.entropies[b, :n],
            rewards=batch.rewards[b, :turns].tolist(), penalties=batch.penalties[b, :turns].tolist(),
            turns=batch.infos[b]["turns"], text=batch.texts[b], success=bool(batch.success[b]),
            terminated=bool(batch.terminated[b]), truncated=bool(batch.truncated[b]),
            context_cut=bool(batch.context_cut[b]), group=int(batch.group_ids[b])))
    return out


def play(model, tokenizer, rows, env="sokoban", **options):
    """rollout() of rows [(group, level seed, noise seed), ...]; env: a name, or a function that makes one."""
    make = env if callable(env) else lambda: envs.make_env(env)
    groups, seeds, noise = zip(*rows)
    return rollout.rollout(model, tokenizer, [make() for _ in rows], list(seeds), list(noise), list(groups), **options)


def same_rows(a, b, tolerance=1e-5):
    """Two rows of rows_of() are the same, id for id; log-probs and entropies up to rounding."""
    for key in a:
        if key in ("logprobs", "entropies"):
            assert torch.allclose(a[key], b[key], atol=tolerance, rtol=0), key
        else:
            assert a[key] == b[key], key


# ------------------------------------------------------------------------------------------------------ templates

CHATML_SYSTEM = """{% if messages[0]['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{ '<|begin|>' }}{% for m in messages %}<|start_header|>{{ m['role'] }}<|end_header|>

{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>

{% endif %}"""
GEMMA = """{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
{% endif %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ m['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""".replace("\\\n", "")
QWEN3 = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1].lstrip() }}{% else %}{{ m['content'] }}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}""".replace("\\\n", "")
MISTRAL = """{{ '<s>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]\
{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}""".replace("\\\n", "")
OLMO = """{{ eos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|user|>
{{ m['content'] }}
{% else %}<|assistant|>
{{ m['content'] }}{{ eos_token }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# name -> (template, further special tokens, end-of-sequence token, whether there is a pad token)
FAMILIES = {
    "chatml": (None, (), None, True),
    "system": (CHATML_SYSTEM, (), None, True),
    "llama3": (LLAMA3, ("<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "<|end_of_text|>"),
               "<|end_of_text|>", False),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), "<eos>", True),
    "qwen3": (QWEN3, (), None, True),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", False),
    "olmo": (OLMO, ("<|end|>",), "<|end|>", True),      # its end token opens the dialogue, too
}


FAMILY_NAMES = list(FAMILIES)


@lru_cache
def family(name):
    return micro_tokenizer(*FAMILIES[name])

ENDS = {"chatml": "<|im_end|>", "system": "<|im_end|>", "llama3": ["<|end_of_text|>", "<|eot|>"],
        "gemma": ["<eos>", "<end_of_turn>"], "qwen3": "<|im_end|>", "mistral": "</s>", "olmo": "<|end|>"}


# --------------------------------------------------------------------- templates and shapes as they are published

QWEN25 = """{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" \
and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".replace("\\\n", "")
QWEN3_HYBRID = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
QWEN35 = QWEN3_HYBRID.replace("""    {%- if enable_thinking is defined and enable_thinking is false %}
""", """    {%- if enable_thinking is defined and enable_thinking is true %}
        {{- '<think>\n' }}
    {%- else %}
""")
LLAMA32 = """{{- '<|begin|>' }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "<|start_header|>system<|end_header|>\n\nCutting Knowledge Date: December 2023\nToday Date: " + date_string }}
{{- "\n\n<|eot|>" }}
{%- for message in messages %}
    {{- '<|start_header|>' + message['role'] + '<|end_header|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|end_header|>\n\n' }}
{%- endif %}
"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def metaspace_tokenizer(template):
    """Of the SentencePiece kind (Llama 2, TinyLlama): blanks are part of a token, and one is put before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=[chr(i) for i in (*range(32, 127), 10)],
        show_progress=False))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<answer>", "</answer>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>",
                                   chat_template=template, clean_up_tokenization_spaces=False)


GEMMA_TOKENS, LLAMA_TOKENS = FAMILIES["gemma"][1], FAMILIES["llama3"][1]
# name -> (how to make the tokenizer, the config class of the model, end tokens in generation_config.json)
PUBLISHED = {
    "qwen2.5": (lambda: micro_tokenizer(QWEN25), Qwen2Config, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (lambda: micro_tokenizer(QWEN3_HYBRID), Qwen3Config, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3.5": (lambda: micro_tokenizer(QWEN35), Qwen3Config, ["<|im_end|>", "<|endoftext|>"]),
    "llama3.2": (lambda: micro_tokenizer(LLAMA32, LLAMA_TOKENS, "<|eot|>", pad=False), LlamaConfig,
                 ["<|end_of_text|>", "<|eot|>"]),
    "gemma2": (lambda: micro_tokenizer(GEMMA, GEMMA_TOKENS, "<eos>"), Gemma2Config, ["<eos>", "<end_of_turn>"]),
    "mistral": (lambda: micro_tokenizer(*FAMILIES["mistral"][:3], pad=False), LlamaConfig, "</s>"),
    "zephyr": (lambda: metaspace_tokenizer(ZEPHYR), LlamaConfig, "</s>"),
    "gpt2": (micro_tokenizer, GPT2Config, "<|im_end|>"),
}


def published(name, folder, extra=24):
    """A random model of a published family in a folder, with more logits than tokens and a generation config that wants
    everything otherwise."""
    make, config, ends = PUBLISHED[name]
    tokenizer = make()
    shape = dict(vocab_size=len(tokenizer) + extra, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
                 bos_token_id=None, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False)
    if config is GPT2Config:
        shape |= dict(n_embd=64, n_layer=2, n_head=4, n_positions=1400, resid_pdrop=0.4)
    else:
        shape |= dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, head_dim=16, max_position_embeddings=2048)
    if config is Gemma2Config:
        shape |= dict(sliding_window=16, query_pre_attn_scalar=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(**shape)).eval()
    if name != "zephyr":                    # whose tokens are others
        with_habits(model, tokenizer)
    ends = tokenizer.convert_tokens_to_ids(ends if isinstance(ends, list) else [ends])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "generation_config.json").write_text(json.dumps(dict(
        eos_token_id=ends if len(ends) > 1 else ends[0], pad_token_id=-1, top_k=1, top_p=0.1, temperature=0.0,
        repetition_penalty=9.0, max_length=3, min_new_tokens=5, do_sample=False, num_return_sequences=4,
        suppress_tokens=ends, forced_eos_token_id=ends[0], cache_implementation="nope")))
    return str(folder)
