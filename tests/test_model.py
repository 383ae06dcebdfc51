"""model.py: chat templates of many families cut into pieces that put themselves together again, loading, the critic,
and checkpoints that survive whatever happens while they are written."""
import doctest
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (ENDS, FAMILY_NAMES, PUBLISHED, TINY, Walk, family, micro_gpt2, micro_llama, micro_tokenizer, oracle,
                      play, published, rows_of, slow_scores)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, BartConfig, CLIPConfig, Qwen2Config, Qwen2ForCausalLM,
                          T5Config)

import envs
import model as module
import rollout
from model import (LORA_ALPHA, ChatFormat, Critic, LoRA, add_lora, find_checkpoint, load_policy, load_trainer, memory_plan,
                   read_model, save_checkpoint, trainable)
from starpo import token_logprobs, token_values
from tiny.rebuild import tiny_model

TEXTS = ("Up", "level 3\n#_XP_#\nTurn 1 of 5.", "two\n\nlines || and <answer>more</answer>", "x",
         "Reply as <think>it</think>.")


def chat_of(name):
    tokenizer = family(name)
    policy = micro_llama(tokenizer)
    policy.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ENDS[name])
    return ChatFormat(tokenizer, policy)


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 400


# ------------------------------------------------------------------------------------------------- the chat format

@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pieces_are_the_templates_own_rendering(name):
    """For dialogues of one to three turns, of any texts, ids and text are what the tokenizer makes of the template."""
    chat, tokenizer = chat_of(name), family(name)
    for texts in itertools.product(TEXTS[:3], ("ok", "fine\nthen"), TEXTS, ("no",), TEXTS[:2]):
        for count in (1, 3, 5):
            ids = chat.first(texts[0])
            for reply, text in zip(texts[1:count:2], texts[2:count:2]):
                ids += chat.encode(reply) + chat.forced_end + chat.following(text)
            roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[:count])]
            whole = tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
            want = tokenizer(whole, add_special_tokens=False)["input_ids"]
            if name == "qwen3":     # a past turn is rendered without the thought that its prompt opened
                opened, past = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"
                assert tokenizer.decode(ids).replace(opened, past) == tokenizer.decode(want).replace(opened, past)
            else:
                assert tokenizer.decode(ids) == whole and ids == want


EXPECTED = {    # head, what stands between a user's text and the reply, the end token, the stop tokens
    "chatml": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", {"<|im_end|>"}),
    "system": ("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
               "<|im_end|>", {"<|im_end|>"}),
    "llama3": ("<|begin|><|start_header|>user<|end_header|>\n\n", "<|eot|><|start_header|>assistant<|end_header|>\n\n",
               "<|eot|>", {"<|eot|>", "<|end_of_text|>"}),
    "gemma": ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>",
              {"<end_of_turn>", "<eos>"}),
    "qwen3": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_end|>", {"<|im_end|>"}),
    "mistral": ("<s>[INST]", "[/INST]", "</s>", {"</s>"}),
    "olmo": ("<|end|><|user|>\n", "\n<|assistant|>\n", "<|end|>", {"<|end|>"}),
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pieces_in_plain_text(name):
    chat, decode = chat_of(name), family(name).decode
    head, tail, end, stops = EXPECTED[name]
    assert (decode(chat.head), decode(chat.tail), decode([chat.end_id])) == (head, tail, end)
    assert {decode([i]) for i in chat.stop_ids} == stops and decode(chat.forced_end) == end
    assert chat.opens_thought == (name == "qwen3")
    assert chat.first("Up") == chat.head + chat.encode("Up") + chat.tail
    assert chat.following("Up") == chat.between + chat.encode("Up") + chat.tail
    if "bos" in head or "begin" in head:
        assert chat.head.count(chat.head[0]) == 1 and chat.head[0] not in chat.between      # one BOS, at the start


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_environments_text_is_never_a_special_token(name):
    tokenizer, chat = family(name), chat_of(name)
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    dice = random.Random(0)
    for _ in range(50):
        text = "".join(dice.choice([*special.values(), "x", " ", "\n", "<", "|", "im_end", ">"]) for _ in range(8))
        ids = chat.encode(text)
        assert not set(ids) & set(special) and tokenizer.decode(ids) == text
        first = [i for i in chat.first(text) if i in special]
        assert first == [i for i in chat.head + chat.tail if i in special]
    assert set(chat.encode("".join(special.values()), special=True)) == set(special)


def test_several_end_tokens_and_none(tok):
    policy = micro_llama(tok)
    for ends, stops in ((None, {2}), (2, {2}), (0, {0, 2}), ([0, 1], {0, 1, 2}), ((7,), {2, 7})):
        policy.generation_config.eos_token_id = ends
        assert ChatFormat(tok, policy).stop_ids == stops
    policy.generation_config = None
    assert ChatFormat(tok, policy).stop_ids == ChatFormat(tok).stop_ids == {2}
    without = micro_tokenizer()
    without.eos_token = None
    assert ChatFormat(without, micro_llama(tok)).end_id == 2


def test_an_end_token_that_is_only_marked_special():
    """The template ends a turn with a special token that neither the tokenizer nor the model declares as its eos."""
    tokenizer = family("llama3")
    chat = ChatFormat(tokenizer, micro_llama(tokenizer))
    assert tokenizer.decode([chat.end_id]) == "<|eot|>" and len(chat.stop_ids) == 2


FIRST = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REFUSED = {
    "counts its messages": "{{ messages | length }}" + FIRST + OPEN,
    "numbers its turns":
        "{% for m in messages %}{{ loop.index }}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}" + OPEN,
    "shows the last alone": "<|im_start|>{{ messages[-1]['content'] }}<|im_end|>\n" + OPEN,
    "drops the user":
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
    "changes the text": FIRST.replace("m['content']", "m['content'] | upper") + OPEN,
    "repeats the text": FIRST.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}") + OPEN,
    "ends the last turn alone": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
                                "{% if loop.last %}<|im_end|>{% endif %}\n{% endfor %}" + OPEN,
    "marks the newest":
        FIRST.replace("{{ m['content'] }}", "{% if loop.last %}new: {% endif %}{{ m['content'] }}") + OPEN,
    "has no end token": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
    "wants a system turn":
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system\nfirst') }}{% endif %}" + FIRST,
    "is broken": "{% for m in messages %}",
    "calls what is not there": FIRST + "{{ nothing.at_all() }}",
    "is empty": " ",
}


@pytest.mark.parametrize("why", REFUSED)
def test_templates_that_are_refused_with_one_line(why):
    with pytest.raises(ValueError) as error:
        ChatFormat(micro_tokenizer(REFUSED[why]))
    assert one_line(error) and "chat template" in str(error.value)


def test_no_template_is_refused_with_one_line(tmp_path, tok):
    bare = micro_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError) as error:
        ChatFormat(bare)
    assert one_line(error) and "template" in str(error.value)
    micro_llama(tok).save_pretrained(tmp_path / "m")
    bare.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError) as error:
        load_policy(str(tmp_path / "m"))
    assert one_line(error)


def test_closes_tag_and_decode(tok):
    chat = ChatFormat(tok)
    assert all(chat.closes_tag(i) == (">" in tok.decode([i])) for i in range(len(tok)))
    text = " a , b .  <|im_end|> it 's\n</answer> √"
    assert chat.decode(chat.encode(text)) == text and chat.decode(chat.encode(text, special=True)) == text


# ------------------------------------------------------------------------------------------------------- loading

@pytest.fixture(scope="module")
def folder(tmp_path_factory, tok):
    path = tmp_path_factory.mktemp("models") / "micro"
    micro_llama(tok).save_pretrained(path)
    tok.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["no/such-model", "./nothing/here", "", "tiny2", "/"])
def test_unknown_names_are_one_line(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as error:
        load_policy(name)
    assert one_line(error) and "--model" in str(error.value)


def test_folders_that_hold_no_model_are_one_line(tmp_path, folder):
    for path, text in (("config.json", "{"), ("config.json", "{}"), ("config.json", None), ("model.safetensors", None),
                       ("tokenizer.json", "{")):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        (broken / path).unlink()
        if text is not None:
            (broken / path).write_text(text)
        with pytest.raises(ValueError) as error:
            load_policy(str(broken))
        assert one_line(error) and "--model" in str(error.value)


def test_damaged_weights_are_one_line(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError) as error:
        load_policy(str(tmp_path / "broken"))
    assert one_line(error) and "--model" in str(error.value)


def test_a_bfloat16_folder_is_loaded_as_float32_in_eval_mode(tmp_path, tok):
    policy = micro_gpt2(tok).to(torch.bfloat16)
    policy.train().save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded, tokenizer = load_policy(str(tmp_path), device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert not any(m.training for m in loaded.modules()) and loaded.config.resid_pdrop == 0.4
    for a, b in zip(policy.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.float(), b)
    assert loaded(input_ids=torch.tensor([[1, 2, 3]])).logits.dtype == torch.float32
    assert len(tokenizer) == len(tok)


def test_bfloat16_computes_in_half_and_keeps_float32_weights(folder):
    model, _ = load_policy(str(folder), "cpu", "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = torch.tensor([[1, 5, 9, 30]])
    hidden = model.base_model(input_ids=ids).last_hidden_state
    assert model.get_output_embeddings()(hidden).dtype == torch.bfloat16
    exact, _ = load_policy(str(folder), "cpu", "float32")
    a, b = model.base_model(input_ids=ids).last_hidden_state.float(), exact.base_model(input_ids=ids).last_hidden_state
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=0.2)


def test_a_tokenizer_without_a_pad_token(tmp_path):
    tokenizer = family("llama3")
    policy = micro_llama(tokenizer)
    policy.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ENDS["llama3"])
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id is None
    _, loaded = load_policy(str(tmp_path), "cpu")
    assert loaded.pad_token_id == loaded.eos_token_id is not None


@pytest.mark.skipif(not (TINY / "config.json").exists(), reason="tiny/ has not been built (python model.py --rebuild)")
def test_tiny_as_it_ships():
    policy, tokenizer = load_policy("tiny")
    assert 1e6 <= sum(p.numel() for p in policy.parameters()) <= 2e6
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 4e6
    assert json.loads((TINY / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and not policy.training
    assert 400 <= len(tokenizer) <= 1000 and policy.config.vocab_size >= len(tokenizer)
    assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    assert {path.suffix for path in TINY.iterdir() if path.is_file()} <= {".json", ".safetensors", ".jinja", ".py"}
    chat = ChatFormat(tokenizer, policy)
    assert tokenizer.decode([chat.end_id]) == "<|im_end|>"
    assert all(len(chat.encode(tag)) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>", "######"[:3]))


def test_tiny_model_is_its_seed_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    a, b, c = tiny_model(500), tiny_model(500), tiny_model(500, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same) and not a.training
    assert not torch.equal(next(a.parameters()), next(c.parameters()))


def test_tiny_tokenizer_writes_any_text():
    tok, dice = micro_tokenizer(), random.Random(0)
    for _ in range(200):
        text = "".join(chr(dice.choice([dice.randrange(32, 127), 10, 0x221A, dice.randrange(0xA0, 0x2FFF), 0x1F600]))
                       for _ in range(12))
        ids = tok(text, add_special_tokens=False)["input_ids"]
        assert tok.decode(ids, clean_up_tokenization_spaces=False) == text


# -------------------------------------------------------------------------------------------------------- critic

def test_the_critic_starts_at_zero_from_the_policys_backbone(folder):
    policy, _ = load_policy(str(folder), "cpu")
    critic = Critic(str(folder), "cpu")
    tokens = torch.arange(40).reshape(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[:, 0] = False
    assert (token_values(critic, tokens, mask) == 0).all() and not critic.training
    for a, b in zip(policy.base_model.parameters(), critic.backbone.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    token_values(critic, tokens, mask).sum().backward()
    assert critic.head.weight.grad.abs().sum() > 0
    with torch.no_grad():
        critic.head.bias += 1.5
    assert torch.allclose(token_values(critic, tokens, mask)[:, 1:], torch.tensor(1.5))


# --------------------------------------------------------------------------------------------------- checkpoints

def trained(folder, steps=2, seed=0):
    """A policy, a critic and their optimizers after a few steps of noise."""
    policy, tokenizer = load_policy(str(folder), "cpu")
    critic = Critic(str(folder), "cpu")
    optimizers = {"policy": torch.optim.AdamW(policy.parameters(), lr=1e-3),
                  "critic": torch.optim.AdamW(critic.parameters(), lr=1e-2)}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for optimizer in optimizers.values():
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    return policy, tokenizer, critic, optimizers


def moments(optimizer):
    return {(i, name): torch.as_tensor(value) for i, slots in optimizer.state_dict()["state"].items()
            for name, value in slots.items()}


def assert_same(a, b):
    assert a.keys() == b.keys() and a
    for key in a:
        assert torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype, key


def test_a_checkpoint_is_an_ordinary_folder_and_comes_back_bit_for_bit(folder, tmp_path):
    policy, tokenizer, critic, optimizers = trained(folder)
    path = tmp_path / "run" / "checkpoint"
    path.parent.mkdir()
    save_checkpoint(path, policy, tokenizer, critic, optimizers, {"iteration": 7, "name": "x"})
    plain = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(30).reshape(2, 15)
    assert torch.equal(plain(input_ids=ids).logits, policy(input_ids=ids).logits)
    assert_same(dict(plain.state_dict()), dict(policy.state_dict()))
    again = AutoTokenizer.from_pretrained(path)
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert {p.suffix for p in path.rglob("*") if p.is_file()} <= {".json", ".safetensors", ".jinja"}     # no pickle
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]

    other, _, critic2, optimizers2 = trained(folder, steps=1, seed=9)
    state = load_trainer(path, critic2, optimizers2)
    assert state == {"iteration": 7, "name": "x"}
    assert_same(dict(critic.state_dict()), dict(critic2.state_dict()))
    for name in optimizers:
        assert_same(moments(optimizers[name]), moments(optimizers2[name]))
    fresh = {"policy": torch.optim.AdamW(plain.parameters(), lr=1e-3)}       # and it goes on as if nothing had been
    load_trainer(path, None, fresh)
    for model, optimizer in ((policy, optimizers["policy"]), (plain, fresh["policy"])):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert_same(dict(plain.state_dict()), dict(policy.state_dict()))


def test_a_checkpoint_without_critic_or_optimizers(folder, tmp_path):
    policy, tokenizer = load_policy(str(folder), "cpu")
    save_checkpoint(tmp_path / "c", policy, tokenizer)
    assert load_trainer(tmp_path / "c") == {} and find_checkpoint(tmp_path / "c") == tmp_path / "c"
    untouched = torch.optim.AdamW(policy.parameters())
    load_trainer(tmp_path / "c", None, {"policy": untouched})
    assert not untouched.state_dict()["state"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_broken_model_never_replaces_a_good_one(folder, tmp_path, broken, value):
    policy, tokenizer, critic, optimizers = trained(folder)
    path = tmp_path / "checkpoint"
    save_checkpoint(path, policy, tokenizer, critic, optimizers, {"iteration": 1})
    files = {p: p.read_bytes() for p in path.iterdir()}
    with torch.no_grad():
        list(dict(policy=policy, critic=critic)[broken].parameters())[-1].view(-1)[0] = value
    with pytest.raises(FloatingPointError) as error:
        save_checkpoint(path, policy, tokenizer, critic, optimizers, {"iteration": 2})
    assert one_line(error)
    assert {p: p.read_bytes() for p in path.iterdir()} == files
    with pytest.raises(FloatingPointError):
        save_checkpoint(tmp_path / "other", policy, tokenizer, critic)
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def pair(folder):
    return trained(folder), trained(folder, steps=3)


class Killed(BaseException):
    pass


STEPS = ("shutil.rmtree", "os.rename", "save_file", "Path.write_text", "model.save_pretrained",
         "tokenizer.save_pretrained")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(folder, pair, tmp_path, monkeypatch, step, after):
    """Before and after each call that touches the disk, a kill: the checkpoint found then is the last good one, or
    the new one whole, with weights and state of the same moment. The next save works again."""
    kill_everywhere(folder, pair, tmp_path, monkeypatch, step, after, second=False)


@pytest.mark.parametrize("step,after", [("shutil.rmtree", True), ("os.rename", False)])
def test_a_second_kill_leaves_one_too(folder, pair, tmp_path, monkeypatch, step, after):
    """An earlier kill had left the good one under its other name."""
    kill_everywhere(folder, pair, tmp_path, monkeypatch, step, after, second=True)


def kill_everywhere(folder, pair, tmp_path, monkeypatch, step, after, second):
    """A save for each call of `step` that it makes, killed there; second: the good checkpoint is called .old."""
    good, new = pair
    names = {"shutil.rmtree": (module.shutil, "rmtree"), "os.rename": (module.os, "rename"),
             "save_file": (module, "save_file"), "Path.write_text": (Path, "write_text"),
             "model.save_pretrained": (type(new[0]), "save_pretrained"),
             "tokenizer.save_pretrained": (type(new[1]), "save_pretrained")}
    owner, name = names[step]
    whole = getattr(owner, name)
    for number in range(4):
        path = tmp_path / f"run{number}" / "checkpoint"
        path.parent.mkdir()
        save_checkpoint(path, *good, {"iteration": 1})
        if second:
            path.rename(path.with_name("checkpoint.old"))
        calls = []

        def fails(*args, **kwargs):
            calls.append(1)
            if len(calls) == number + 1 and not after:
                raise Killed
            result = whole(*args, **kwargs)
            if len(calls) == number + 1:
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            try:
                save_checkpoint(path, *new, {"iteration": 2})
            except Killed:
                pass
        if len(calls) <= number and number:
            break
        found = find_checkpoint(path)
        critic = Critic(str(folder), "cpu")
        policy, _ = load_policy(str(found), "cpu")
        optimizers = {name: torch.optim.AdamW(m.parameters()) for name, m in (("policy", policy), ("critic", critic))}
        state = load_trainer(path, critic, optimizers)
        want = {1: good, 2: new}[state["iteration"]]
        assert_same(dict(policy.state_dict()), dict(want[0].state_dict()))
        assert_same(dict(critic.state_dict()), dict(want[2].state_dict()))
        for key in optimizers:
            assert_same(moments(optimizers[key]), moments(want[3][key]))
        save_checkpoint(path, *new, {"iteration": 3})
        assert load_trainer(path)["iteration"] == 3 and [p.name for p in path.parent.iterdir()] == ["checkpoint"]


def test_no_checkpoint_is_one_line(tmp_path):
    for path in (tmp_path / "checkpoint", tmp_path):
        with pytest.raises(ValueError) as error:
            find_checkpoint(path)
        assert one_line(error)
    (tmp_path / "checkpoint").mkdir()          # there, but unfinished
    with pytest.raises(ValueError):
        load_trainer(tmp_path / "checkpoint")


# ------------------------------------------------------------------------------------- families as they are published

@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    return {name: published(name, tmp_path_factory.mktemp("published") / name) for name in PUBLISHED}


REPLIES = ("Down || Up</answer>", "plain words, no tags", "<answer>up</answer>", "x <answer>Jump</answer>")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dialogue_is_the_templates_own_rendering(releases, name):
    """Whatever is shown before each reply is, id for id, what the tokenizer makes of the template's whole text: one BOS,
    system turns and dates as the template writes them, no blank of the tokenizer's own; today's date never."""
    policy, tokenizer = load_policy(releases[name], "cpu")
    chat, env, said = ChatFormat(tokenizer, policy), Walk(), []
    env.max_turns = len(REPLIES)
    episode = rollout.Episode(env, chat, 3, 0, 60, 10_000, True, 0.1)
    users = [envs.first_prompt(env, episode.observation, True)]
    for reply in REPLIES:
        roles = [m for user, answer in zip(users, said) for m in (("user", user), ("assistant", answer))]
        roles = [dict(role=role, content=text) for role, text in [*roles, ("user", users[-1])]]
        whole = tokenizer.apply_chat_template(
            roles, tokenize=False, add_generation_prompt=True, enable_thinking=True,
            chat_template=tokenizer.chat_template.replace('strftime_now("%d %b %Y")', '"01 Jan 2025"'))
        opened = "" if whole.rstrip().endswith("<think>") else "<think>"
        if name == "qwen3.5":           # a past turn is rendered without the thought that its prompt opened
            head, *turns, last = whole.split("<|im_start|>assistant\n")
            whole = "<|im_start|>assistant\n".join([head, *("<think>\n" + turn for turn in turns), last])
        assert episode.ids == tokenizer(whole + opened, add_special_tokens=False)["input_ids"]
        assert not any(episode.sampled[-5:])
        for token in [*chat.encode(reply), chat.end_id]:
            if episode.take(token):
                break
        said.append(("" if name == "qwen3.5" else "<think>") + reply)
        turn = len(said) + 1
        episode.act()
        played = episode.turns[-1]
        users.append(envs.next_prompt(env, episode.observation, played["reward"], played["valid"], turn,
                                      env.max_actions - episode.used))
    assert len(episode.turns) == len(REPLIES) and episode.truncated


@pytest.mark.parametrize("name", PUBLISHED)
def test_sampled_dialogues_of_a_published_family(releases, name):
    """Mask = sampled ids; log-probs = one-by-one scoring = the update's; the generation config has no say; ids beyond
    the tokenizer's are never drawn, and count nothing."""
    policy, tokenizer = load_policy(releases[name], "cpu")
    batch = play(policy, tokenizer, [(0, 1, 0), (0, 1, 1), (1, 2, 0)], env=Walk, max_new_tokens=12, temperature=0.8)
    again, entropies = token_logprobs(policy, batch.tokens, batch.loss_mask, batch.group_ids, 0.8, with_entropy=True,
                                      vocab_size=len(tokenizer))
    assert torch.allclose(again, batch.logprobs, atol=1e-5) and torch.allclose(entropies, batch.entropies, atol=1e-4)
    assert policy.get_output_embeddings().weight.shape[0] == len(tokenizer) + 24 > batch.tokens.max() + 24
    chat = ChatFormat(tokenizer, policy)
    assert max(len(info["turns"]) for info in batch.infos) > 1
    for row in rows_of(batch):
        want, _ = slow_scores(policy, row["ids"], row["mask"], 0.8, vocab=len(tokenizer))
        assert torch.allclose(row["logprobs"], want, atol=1e-5)
        for turn, played in enumerate(row["turns"]):
            drawn = [i for i, m, k in zip(row["ids"], row["mask"], row["turn"]) if m and k == turn]
            assert chat.decode([i for i in drawn if i not in chat.stop_ids]) == played["reply"]
            assert all(i not in chat.stop_ids for i in drawn[:-1])


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_end_token_of_a_family_ends_a_reply(releases, name):
    policy, tokenizer = load_policy(releases[name], "cpu")
    ends = policy.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    assert [tokenizer.decode([i]) for i in ends] == ([*PUBLISHED[name][2]] if len(ends) > 1 else [PUBLISHED[name][2]])
    for end in ends:
        said = ChatFormat(tokenizer, policy).encode("Up") + [end]
        player = oracle(tokenizer, lambda level, turn: said)
        player.generation_config = policy.generation_config
        batch = play(player, tokenizer, [(0, 1, 0)], env=Walk, max_new_tokens=9)
        (row,) = rows_of(batch)
        assert len(row["turns"]) == Walk.max_turns
        assert [i for i, m in zip(row["ids"], row["mask"]) if m] == said * Walk.max_turns


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_family_survives_saving(releases, tmp_path, name):
    """save_pretrained, which refuses some generation configs, does not see what the folder asked for."""
    policy, tokenizer = load_policy(releases[name], "cpu")
    save_checkpoint(tmp_path / "c", policy, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert_same(dict(plain.state_dict()), dict(policy.state_dict()))
    asked = json.loads((tmp_path / "c" / "generation_config.json").read_text())
    assert asked["eos_token_id"] == policy.generation_config.eos_token_id
    assert not asked.keys() & {"top_k", "top_p", "temperature", "repetition_penalty", "max_length", "suppress_tokens"}
    _, tokenizer2 = load_policy(str(tmp_path / "c"), "cpu")
    assert ChatFormat(tokenizer2, plain).stop_ids == ChatFormat(tokenizer, policy).stop_ids


def test_a_template_that_asks_whether_thoughts_are_wanted(releases):
    empty = "<think>\n\n</think>\n\n"
    for name in ("qwen3", "qwen3.5"):
        policy, tokenizer = load_policy(releases[name], "cpu")
        with_thoughts, without = (ChatFormat(tokenizer, policy, think) for think in (True, False))
        assert with_thoughts.opens_thought == (name == "qwen3.5") and not without.opens_thought
        assert tokenizer.decode(without.tail).endswith(empty) and empty not in tokenizer.decode(with_thoughts.tail)


# ----------------------------------------------------------------------------------- refused before weights are read

def cannot(name, device="cpu"):
    with pytest.raises(ValueError) as error:
        load_policy(str(name), device)
    assert one_line(error)
    return str(error.value)


def test_what_cannot_work_is_said_before_any_weights_are_read(tmp_path, folder, tok, monkeypatch):
    def read(*args, **kwargs):
        raise AssertionError("weights were read")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)

    def changed(tokenizer=None, config=None):
        path = tmp_path / "changed"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder, path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        if config is not None:
            config.save_pretrained(path)
        return path

    bare = micro_tokenizer()
    bare.chat_template = None
    (tmp_path / "changed").mkdir()
    path = changed()
    (path / "chat_template.jinja").unlink(missing_ok=True)
    bare.save_pretrained(path)
    assert "chat template" in cannot(path)
    for why in ("is broken", "has no end token", "counts its messages"):
        assert "chat template" in cannot(changed(micro_tokenizer(REFUSED[why])))
    assert "encoder-decoder" in cannot(changed(config=T5Config())) and "t5" in cannot(changed(config=T5Config()))
    assert "encoder-decoder" in cannot(changed(config=BartConfig()))
    assert "AutoModelForCausalLM" in cannot(changed(config=CLIPConfig()))
    more = micro_tokenizer()
    more.add_tokens(["wall", "box"])
    assert "embedding" in cannot(changed(more))
    assert "embedding" in cannot(changed(micro_tokenizer(
        FIRST.replace("<|im_start|>", "<|turn|>") + OPEN.replace("<|im_start|>", "<|turn|>"), ("<|turn|>",))))
    for device in ("tpu9", "cuda:99", "nonsense"):
        assert "--device" in cannot(folder, device)
    assert "weights were read" in cannot(folder)                       # with all in order, they are what is next


def test_a_special_token_without_a_row_that_no_dialogue_holds_does_no_harm(tmp_path, folder):
    """As in Gemma 3, whose tokenizer has one for images."""
    shutil.copytree(folder, tmp_path / "m")
    image = micro_tokenizer(specials=("<image>",))
    image.save_pretrained(tmp_path / "m")
    policy, tokenizer = load_policy(str(tmp_path / "m"), "cpu")
    assert len(tokenizer) == policy.get_input_embeddings().weight.shape[0] + 1
    batch = play(policy, tokenizer, [(0, 1, 0)], env=lambda: Walk(extra="<image> "), max_new_tokens=8)
    assert batch.tokens.max() < len(tokenizer) - 1
    again, _ = token_logprobs(policy, batch.tokens, batch.loss_mask, vocab_size=len(tokenizer))
    assert torch.allclose(again, batch.logprobs, atol=1e-5)


def test_missing_weights_are_not_made_up(tmp_path, folder):
    for gone in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "m")
        weights = load_file(folder / "model.safetensors")
        weights.pop(gone)
        save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
        assert gone in cannot(tmp_path / "m")


def test_loading_leaves_the_random_state_alone(folder):
    before = torch.get_rng_state()
    load_policy(str(folder), "cpu", lora_rank=3)
    Critic(str(folder), "cpu", lora_rank=3)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------------------- LoRA

def tied_qwen2(tokenizer):
    """Tied embeddings, and biases in some of the linear layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=2, pad_token_id=0)).eval()


KINDS = {"llama": micro_llama, "tied": tied_qwen2, "gpt2": micro_gpt2}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, tok):
    paths = {}
    for name, make in KINDS.items():
        paths[name] = str(tmp_path_factory.mktemp("kinds") / name)
        make(tok).save_pretrained(paths[name])
        tok.save_pretrained(paths[name])
    return paths


def shaken(model, seed=0, size=0.05):
    """Other numbers in all that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for p in trainable(model).values():
        p.data += size * torch.randn(p.shape, generator=generator)
    return model


IDS = torch.arange(40).reshape(2, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_starts_as_the_base_model_and_trains_its_factors_alone(kinds, kind):
    base, _ = load_policy(kinds[kind], "cpu")
    policy, _ = load_policy(kinds[kind], "cpu", lora_rank=3)
    assert torch.equal(base(input_ids=IDS).logits, policy(input_ids=IDS).logits)
    factors, frozen = trainable(policy), {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    assert {name.rpartition(".")[2] for name in factors} == {"A", "B"}
    assert {name.replace(".base.", ".") for name in frozen} == {name for name, _ in base.named_parameters()}
    layers = [layer for layer in policy.modules() if isinstance(layer, LoRA)]
    assert len(layers) == 2 * (4 if kind == "gpt2" else 7) and len(factors) == 2 * len(layers)
    assert not isinstance(policy.get_output_embeddings(), LoRA)
    assert (policy.get_output_embeddings().weight is policy.get_input_embeddings().weight) == (kind == "tied")
    assert all(layer.A.std() > 0 and not layer.B.any() for layer in layers)
    twin, _ = load_policy(kinds[kind], "cpu", lora_rank=3)
    assert_same(trainable(twin), factors)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[:, 0] = False
    for step in range(2):               # B moves first, then both; nothing else ever
        token_logprobs(policy, IDS, mask)[0].sum().backward()
        assert all((p.grad.abs().sum() > 0) == (step == 1 or name.endswith("B")) for name, p in factors.items())
        assert all(p.grad is None for p in frozen.values())
        torch.optim.SGD(factors.values(), lr=1e-3).step()
        policy.zero_grad()
    assert not torch.equal(base(input_ids=IDS).logits, policy(input_ids=IDS).logits)
    assert_same({name.replace(".base.", "."): p for name, p in frozen.items()}, dict(base.named_parameters()))


def test_lora_computes_its_formula():
    for rank in (1, 4, 64):
        for base in (nn.Linear(6, 10), nn.Linear(6, 10, bias=False), module.Conv1D(10, 6)):
            layer = LoRA(base, rank, torch.Generator().manual_seed(1))
            shaken(layer, size=1.0)
            x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2))
            change = 64 / rank * (x @ layer.A.T @ layer.B.T)
            assert LORA_ALPHA == 64 and torch.allclose(layer(x), base(x) + change, atol=1e-4, rtol=1e-5)
            assert layer.merged().shape == base.weight.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_checkpoint_is_an_ordinary_folder_and_resumes_bit_for_bit(kinds, tmp_path, kind):
    """Merged weights under the plain names for others; for us the factors, from which a run goes on."""
    def start():
        policy, tokenizer = load_policy(kinds[kind], "cpu", lora_rank=4)
        critic = Critic(kinds[kind], "cpu", lora_rank=4)
        return policy, tokenizer, critic, {name: torch.optim.AdamW(trainable(m).values(), lr=3e-3)
                                           for name, m in (("policy", policy), ("critic", critic))}

    def steps(run, seed):
        generator = torch.Generator().manual_seed(seed)
        for optimizer in run[3].values():
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    run = start()
    steps(run, 1), steps(run, 2)
    before = {name: value.clone() for name, value in run[0].state_dict().items()}
    path = tmp_path / "checkpoint"
    save_checkpoint(path, *run, {"iteration": 2})
    assert_same(dict(run[0].state_dict()), before)
    base, _ = load_policy(kinds[kind], "cpu")
    plain, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()) and plain.state_dict().keys() == base.state_dict().keys()
    want = run[0](input_ids=IDS).logits
    assert torch.allclose(plain(input_ids=IDS).logits, want, atol=1e-5)
    assert not torch.allclose(base(input_ids=IDS).logits, want, atol=1e-2)
    assert {p.suffix for p in path.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert load_file(path / "lora.safetensors").keys() == trainable(run[0]).keys()
    assert not any("base" in key for key in load_file(path / "model.safetensors"))

    again = start()
    assert load_trainer(path, again[2], again[3], again[0]) == {"iteration": 2}
    for _ in range(2):
        assert_same(dict(again[0].state_dict()), dict(run[0].state_dict()))
        assert_same(dict(again[2].state_dict()), dict(run[2].state_dict()))
        for name in run[3]:
            assert_same(moments(again[3][name]), moments(run[3][name]))
        steps(run, 3), steps(again, 3)

    files = {p: p.read_bytes() for p in path.iterdir()}
    trainable(run[0])[[*trainable(run[0])][-1]].data.view(-1)[0] = float("inf")
    with pytest.raises(FloatingPointError):
        save_checkpoint(path, *run, {"iteration": 3})
    assert {p: p.read_bytes() for p in path.iterdir()} == files


@pytest.mark.parametrize("factor", "AB")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_is_refused_even_where_the_other_is_zero(kinds, tmp_path, factor, value):
    policy, tokenizer = load_policy(kinds["llama"], "cpu", lora_rank=2)
    getattr(policy.base_model.layers[1].mlp.up_proj, factor).data[0, 0] = value
    for name, p in trainable(policy).items():
        if "up_proj" in name and not name.endswith(factor):
            p.data.zero_()
    with pytest.raises(FloatingPointError):
        save_checkpoint(tmp_path / "c", policy, tokenizer)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_and_update_agree_with_lora(kinds, kind):
    policy, tokenizer = load_policy(kinds[kind], "cpu", lora_rank=4)
    shaken(policy, size=0.02)
    batch = play(policy, tokenizer, [(0, 1, 0), (0, 1, 1), (1, 2, 0)], env=Walk, max_new_tokens=12)
    again, _ = token_logprobs(policy, batch.tokens, batch.loss_mask, batch.group_ids)
    assert torch.allclose(again, batch.logprobs, atol=1e-5)


def test_lora_computes_in_half_precision_and_learns_in_full(kinds):
    policy, _ = load_policy(kinds["llama"], "cpu", "bfloat16", lora_rank=4)
    shaken(policy)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    kept = {}
    layer = policy.base_model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda _, inputs, output: kept.update(out=output))
    policy.base_model(input_ids=IDS).last_hidden_state.float().sum().backward()
    assert kept["out"].dtype == torch.bfloat16 and layer.A.grad.dtype == torch.float32 and layer.A.grad.any()


def test_a_critic_with_lora_trains_its_factors_and_its_whole_head(kinds):
    critic = Critic(kinds["tied"], "cpu", lora_rank=2)
    names = set(trainable(critic))
    assert {"head.weight", "head.bias"} < names
    assert {name.rpartition(".")[2] for name in names - {"head.weight", "head.bias"}} == {"A", "B"}
    assert {name for name, _ in Critic(kinds["tied"], "cpu").named_parameters()} == set(trainable(Critic(kinds["tied"], "cpu")))


def test_a_model_without_linear_layers_takes_no_lora():
    bare = nn.Module()
    bare.base_model = nn.Sequential(nn.Embedding(3, 2))
    with pytest.raises(ValueError) as error:
        add_lora(bare, 4)
    assert one_line(error) and "--lora_rank" in str(error.value)


# ---------------------------------------------------------------------------------------------------- memory plan

@pytest.fixture(scope="module")
def half_billion(tmp_path_factory, tok):
    """A folder like Qwen2.5-0.5B-Instruct's, without weights."""
    path = tmp_path_factory.mktemp("half") / "billion"
    Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=2,
                bos_token_id=0).save_pretrained(path)
    tok.save_pretrained(path)
    return path


def test_half_a_billion_parameters_are_planned_without_any(half_billion):
    model, tokenizer = read_model(str(half_billion))
    sizes = dict(rows=128, turns=5, max_new_tokens=200, shown_tokens=600)
    plan = memory_plan(model, **sizes)
    assert plan["parameters"] == plan["trained"] == 494_032_768 and model.device.type == "meta"
    assert plan["tokens, an iteration"] == 128 * 1600
    kv = 128 * 1600 * 24 * 2 * 64 * 2 * 4 / 2**30
    assert plan["KV cache"] == pytest.approx(kv) and plan["weights"] == pytest.approx(494_032_768 * 4 / 2**30)
    assert plan["together"] == pytest.approx(4 * plan["weights"] + kv)
    half = memory_plan(model, **sizes, cache_bytes=2, reference=True)
    assert half["KV cache"] == pytest.approx(kv / 2) and half["reference"] == plan["weights"]
    add_lora(model, 64)
    small = memory_plan(model, **sizes, critic=True, reference=True)
    assert small["reference"] == plan["weights"] < small["weights"]
    assert small["trained"] == 35_192_832
    assert small["optimizer"] == pytest.approx(2 * 35_192_832 * 4 / 2**30)
    assert small["critic"] == pytest.approx((494_032_768 + 4 * (35_192_832 + 897)) * 4 / 2**30)
    assert "weights" in cannot(half_billion)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["gpt2", "tied", "gemma2", "tiny"])
def test_the_plan_is_what_a_run_then_holds(kinds, releases, monkeypatch, name, rank):
    """Byte by byte: weights, gradients, moments, the critic, and a slot of the cache."""
    path = kinds.get(name) or releases.get(name) or name
    caches = []
    monkeypatch.setattr(rollout, "KVCache", lambda rows, make=rollout.KVCache: caches.append(make(rows)) or caches[0])
    policy, tokenizer = load_policy(path, "cpu", lora_rank=rank)
    critic = Critic(path, "cpu", lora_rank=rank)
    planned, _ = read_model(path)
    if rank:
        add_lora(planned, rank)
    batch = play(policy, tokenizer, [(0, 1, 0), (0, 1, 1)], env=Walk, max_new_tokens=6)
    longest = int(batch.lengths.max())
    plan = memory_plan(planned, rows=2, turns=4, max_new_tokens=6, shown_tokens=longest - 24, critic=True)
    assert plan["tokens, an iteration"] == 2 * longest
    size = lambda tensors: sum(x.numel() * x.element_size() for x in tensors) / 2**30
    assert size(policy.parameters()) == pytest.approx(plan["weights"])
    stores = [store[:, :, :longest] for store in caches[0].keys + caches[0].values]
    assert size(stores) == pytest.approx(plan["KV cache"] * min(1, stores[0].shape[2] / longest))
    held = {}
    for label, model in (("policy", policy), ("critic", critic)):
        optimizer = torch.optim.AdamW(trainable(model).values())
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        held[label] = (size(model.parameters()), size(p.grad for p in model.parameters() if p.grad is not None),
                       size(x for key, x in moments(optimizer).items() if key[1] != "step"))
    assert held["policy"] == pytest.approx((plan["weights"], plan["gradients"], plan["optimizer"]))
    assert sum(held["critic"]) == pytest.approx(plan["critic"])


def test_the_plan_stops_at_the_context_limit_and_needs_a_config(kinds):
    model, _ = read_model(kinds["gpt2"])                 # 1,400 positions
    plan = memory_plan(model, rows=3, turns=100, max_new_tokens=50, shown_tokens=900)
    assert plan["tokens, an iteration"] == 3 * 1400 and plan["tokens sampled, a row"] == 1400
    with pytest.raises(ValueError) as error:
        read_model("Qwen/no-such-model-anywhere")
    assert one_line(error) and "--model" in str(error.value)



def test_doctests():
    assert doctest.testmod(module).failed == 0
