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
from conftest import ENDS, FAMILY_NAMES, TINY, family, micro_gpt2, micro_llama, micro_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import model as module
from model import ChatFormat, Critic, find_checkpoint, load_policy, load_trainer, save_checkpoint, tiny_model
from starpo import token_values

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
    assert {path.suffix for path in TINY.iterdir()} <= {".json", ".safetensors", ".jinja"}
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


def test_doctests():
    assert doctest.testmod(module).failed == 0
