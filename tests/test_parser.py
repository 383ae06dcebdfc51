"""parse_response and reply_end: one documented outcome for each kind of reply, and no text that raises."""
import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import Parsed, make_env, opening_tag, parse_response, reply_end  # noqa: E402

ACTIONS = ("Up", "Down", "Left", "Right")
BAD = None          # in the tables: an invalid reply

# reply behind the prefilled <think> -> the actions, or BAD
THINKING = {
    "go</think><answer>Up</answer>": ["Up"],
    "</think><answer>Up</answer>": ["Up"],                                             # an empty thought is valid
    " \n </think>\n\n<answer>Up</answer>": ["Up"],
    "go</think><answer>Up || Down</answer>": ["Up", "Down"],
    "go</think><answer>Up||Down</answer>": ["Up", "Down"],
    "go</think><answer>\n  uP  ||\tDOWN\n</answer>": ["Up", "Down"],                    # case and outer blanks
    "go</think><answer>Up\u00a0|| \u2003Left</answer>": ["Up", "Left"],
    "go</think><answer>|| Up || || Down ||</answer>": ["Up", "Down"],                  # empty pieces are dropped
    "go</think><answer>Up || Up || Up</answer>": ["Up", "Up", "Up"],
    "go</think><answer></answer>": BAD,
    "go</think><answer>   </answer>": BAD,
    "go</think><answer>||</answer>": BAD,
    "go</think><answer>Up || Fly</answer>": BAD,                                       # valid as a whole or not at all
    "go</think><answer>Fly</answer>": BAD,
    "go</think><answer>Up, Down</answer>": BAD,
    "go</think><answer>Up | Down</answer>": BAD,
    "go</think><answer>Up Down</answer>": BAD,
    "go</think><answer>Up.</answer>": BAD,
    "go</think><answer>U p</answer>": BAD,
    "go</think><answer>Up ||| Down</answer>": BAD,                                     # "| Down" is no action
    "go</think><answer>Up || || | Down</answer>": BAD,
    "go</think><answer>Up || Down || Left || Fly || Up || Up || Up</answer>": BAD,     # checked before the cut
    "go</think><answer>Up || Down || Left || Up || Up || Fly</answer>": BAD,
    "go</think>then <answer>Up</answer> and more": ["Up"],                             # text around the answer
    "go</think><answer>Up</answer><answer>Down</answer>": ["Up"],                      # the first answer counts
    "go</think><answer>Fly</answer><answer>Down</answer>": BAD,
    "go</think></think><answer>Up</answer>": ["Up"],
    "go</think><think>again</think><answer>Up</answer>": ["Up"],
    "a <think> b</think><answer>Up</answer>": ["Up"],
    "a <answer>Down</answer> b</think><answer>Up</answer>": ["Up"],                    # an answer inside the thought
    "a <answer>Down</answer> b</think>": BAD,
    "a <answer>Down</answer>": BAD,                                                    # the thought was never closed
    "a <answer>Down</think></answer><answer>Up</answer>": BAD,                         # </answer> comes first
    "go</think></answer><answer>Up</answer>": BAD,
    "go</think><answer><answer>Up</answer></answer>": BAD,                             # nested: "<answer>Up" is no action
    "go</think><answer>Up<answer>Down</answer>": BAD,
    "go</think><answer>Up</think></answer>": BAD,
    "go</think><answer>Up": BAD,                                                       # unclosed
    "go</think><answer>Up</answer": BAD,
    "go</think><answer>Up<answer>": BAD,
    "go</think>Up</answer>": BAD,
    "go</think>Up": BAD,
    "go</think>": BAD,
    "go": BAD,
    "": BAD,
    "Up": BAD,
    "go</THINK><answer>Up</answer>": BAD,                                              # tags count as written
    "go</think><Answer>Up</Answer>": BAD,
    "go</think>< answer>Up</ answer>": BAD,
    "go</think><answer>Up</answer>\nReward 10.90.\nTurn 2 of 5\n</think><answer>Down</answer>": ["Up"],   # writes on
    "go\nuser\nTurn 2 of 5, 9 actions left.\nassistant\n<think>x</think><answer>Down</answer>": ["Down"],
    "go<|im_end|></think><answer>Up<|im_end|></answer>": BAD,
    "go<|im_end|></think><answer>Up</answer><|im_end|>": ["Up"],
}
# reply behind the prefilled <answer>
ALONE = {
    "Up</answer>": ["Up"],
    " down ||\nLEFT </answer>": ["Down", "Left"],
    "Up</answer> || Down</answer>": ["Up"],
    "Up": BAD,
    "</answer>": BAD,
    "": BAD,
    "Fly</answer>": BAD,
    "Up || Fly</answer>": BAD,
    "<answer>Up</answer>": BAD,
    "<think>x</think><answer>Up</answer>": BAD,
    "Up</think></answer>": BAD,
}


@pytest.mark.parametrize("think, reply, actions", [(True, *row) for row in THINKING.items()] +
                         [(False, *row) for row in ALONE.items()])
def test_documented_outcomes(think, reply, actions):
    parsed = parse_response(opening_tag(think) + reply, ACTIONS, 5, think)
    assert (parsed.actions, parsed.valid, parsed.surplus) == (actions or [], actions is not BAD, 0)


@pytest.mark.parametrize("text, thought", [
    ("<think>go on</think><answer>Up</answer>", "go on"), ("<think> \n go\n</think>", "go"), ("<think></think>", ""),
    ("<think>never closed <answer>Up</answer>", "never closed <answer>Up</answer>"),
    ("<think>a <think> b</think> c</think><answer>Fly</answer>", "a <think> b"),
])
def test_the_thought(text, thought):
    assert parse_response(text, ACTIONS, 5).thought == thought
    assert parse_response(text, ACTIONS, 5, think=False).thought == ""


@pytest.mark.parametrize("count, limit, kept, surplus", [(3, 5, 3, 0), (5, 5, 5, 0), (6, 5, 5, 1), (20, 5, 5, 15),
                                                         (2, 1, 1, 1), (1, 1, 1, 0)])
def test_surplus_actions_are_cut_and_counted(count, limit, kept, surplus):
    names = [ACTIONS[number % 4] for number in range(count)]
    parsed = parse_response(f"<think>x</think><answer>{' || '.join(names)}</answer>", ACTIONS, limit)
    assert parsed == Parsed(names[:kept], True, "x", surplus)


def test_free_text():
    def parse(answer):
        return parse_response(f"<think>x</think><answer>{answer}</answer>", (), 3)
    assert parse("hello") == Parsed(["hello"], True, "x")
    assert parse("  Two words || and\n more ").actions == ["Two words || and\n more"]      # one action, not split
    assert parse("a <b> c").actions == ["a <b> c"]
    for blank in ("", "  ", "\n\t"):
        assert parse(blank) == Parsed([], False, "x")
    assert not parse_response("<think>x</think><answer>hello", (), 3).valid
    assert parse_response("<answer>hi</answer>", (), 1, think=False).actions == ["hi"]


def test_names_come_back_as_declared():
    names = ("Phoenix", "dragon", "Go Left", "ÉCLAIR", "1")
    for name in names:
        for written in (name, name.upper(), name.lower(), f"\n {name}\t"):
            assert parse_response(f"<answer>{written}</answer>", names, 5, think=False).actions == [name]
    assert not parse_response("<answer>Go  Left</answer>", names, 5, think=False).valid


@pytest.mark.parametrize("text, think, end", [
    ("<think>a</think><answer>Up</answer>", True, 35), ("<think>a</think><answer>Up</answer> more</answer>", True, 35),
    ("a</think><answer>Up</answer>", True, 28), ("<think>a</answer></think>b</answer>", True, 35),
    ("<think>a</answer></think>", True, None), ("<think>a</answer>", True, None), ("", True, None),
    ("<think>a</think><answer>Up</answer", True, None), ("<answer>Up</answer>", False, 19), ("Up</answer>", False, 11),
    ("Up</answe", False, None), ("</answer></answer>", False, 9), ("", False, None),
])
def test_reply_end(text, think, end):
    assert reply_end(text, think) == end


PIECES = ("<think>", "</think>", "<answer>", "</answer>", "Up", "down", "Fly", " || ", "||", "|", " ", "\n", "<", ">", "/",
          "</", "answer>", "think>", "<|im_end|>", "é√", "\x00", "\ud800", "{", "%s", "\\")


def random_text(rng):
    if rng.random() < 0.2:
        return "".join(chr(rng.randrange(1, 0x3000)) for _ in range(rng.randrange(30)))
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(14)))


def test_any_text_has_an_outcome_and_parser_and_stop_rule_agree():
    rng, valid, ended = random.Random(0), 0, 0
    for number in range(40_000):
        think, actions = number % 2 == 0, () if number % 5 == 0 else ACTIONS
        text = opening_tag(think) * (rng.random() < 0.8) + random_text(rng)
        limit = rng.randint(1, 3)
        parsed, end = parse_response(text, actions, limit, think), reply_end(text, think)
        assert isinstance(parsed.thought, str) and parsed.valid == bool(parsed.actions)
        assert len(parsed.actions) <= limit and parsed.surplus >= 0 and (parsed.surplus == 0 or len(parsed.actions) == limit)
        assert all(action in ACTIONS if actions else action.strip() for action in parsed.actions)
        assert end is not None or not parsed.valid
        if end is not None:             # what the rollout stops at holds all that the parser reads, and no less does
            assert text[:end].endswith("</answer>") and parse_response(text[:end] + " x</think><answer>Up</answer>",
                                                                       actions, limit, think) == parsed
            assert parse_response(text[:end], actions, limit, think) == parsed
            assert all(reply_end(text[:cut], think) is None for cut in range(end))
            assert think is False or "</think>" in text[:end]
        valid, ended = valid + parsed.valid, ended + (end is not None)
    assert valid > 500 and ended > 2000


def test_well_formed_replies_around_random_thoughts():
    """Whatever the thought says, if it does not close itself, the answer behind it is what acts."""
    rng = random.Random(1)
    for _ in range(3000):
        thought = random_text(rng).replace("</think>", "")
        names = [rng.choice(ACTIONS) for _ in range(rng.randint(1, 5))]
        answer = " || ".join(rng.choice((str.upper, str.lower, str.title))(name) for name in names)
        if "</think>" in thought + "<":         # a fragment may complete the tag
            continue
        text = f"<think>{thought}\n</think><answer>{answer}</answer>{random_text(rng)}"
        if text.index("</think>") == len("<think>") + len(thought) + 1:
            assert parse_response(text, ACTIONS, 5)[:2] == (names, True)


def test_an_invalid_reply_leaves_the_game_alone():
    """The rollout plays parsed.actions: for an invalid reply there are none, even if some names were known."""
    env = make_env("sokoban")
    obs, _ = env.reset(0)
    for reply in itertools.chain((f"<think>{reply}" for reply, actions in THINKING.items() if actions is BAD)):
        for action in parse_response(reply, env.actions, 5).actions:
            env.step(action)
    assert env.render() == obs and env.actions_left == 10
