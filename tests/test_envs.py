"""envs.py: the rules of each game against literal numbers and independent slow versions that read the printed grid,
seeds, budgets, levels, solvers, prompts, demonstrations, and environments that a user brings."""
import doctest
import hashlib
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
from envs import (first_prompt, lake_transitions, lake_values, make_env, next_prompt, opening_tag,  # noqa: E402
                  parse_response, plan_lengths, random_success)

NAMES = ["bandit", "bandit-test", "bandit-rev", "frozenlake", "sokoban", "sokoban-large", "sokoban-newvocab"]
STEP = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


# ------------------------------------------------------------------- independent Sokoban, on sets of (row, column)

def read(obs):
    """The printed grid -> (walls, targets, boxes, player)."""
    cells = {(r, c): s for r, line in enumerate(obs.split("\n")) for c, s in enumerate(line)}
    players = [cell for cell, s in cells.items() if s in "PS"]
    assert len(players) == 1
    return ({cell for cell, s in cells.items() if s == "#"}, {cell for cell, s in cells.items() if s in "O√S"},
            frozenset(cell for cell, s in cells.items() if s in "X√"), players[0])


def slow_step(walls, targets, boxes, player, action):
    """-> (boxes, player, reward, solved)"""
    dr, dc = STEP[action]
    one, two = (player[0] + dr, player[1] + dc), (player[0] + 2 * dr, player[1] + 2 * dc)
    new = boxes
    if one in boxes and two not in walls and two not in boxes:
        new = boxes - {one} | {two}
    if one not in walls and one not in new:
        player = one
    gained = len(new & targets) - len(boxes & targets)
    solved = new == targets
    reward = -0.1 + (1 if gained > 0 else -1 if gained < 0 else 0) + (10 if solved else 0)
    return frozenset(new), player, reward, solved


def slow_plan_length(obs):
    """Length of the shortest plan, forward breadth first; None if there is none."""
    walls, targets, boxes, player = read(obs)
    seen, queue = {(boxes, player): 0}, deque([(boxes, player)])
    while queue:
        state = queue.popleft()
        if state[0] == targets:
            return seen[state]
        for action in STEP:
            new = slow_step(walls, targets, *state, action)[:2]
            if new not in seen:
                seen[new] = seen[state] + 1
                queue.append(new)
    return None


def place(grid):
    """A Sokoban environment in the state of a square grid."""
    rows = grid.split()
    env = make_env("sokoban", size=max(5, len(rows)))
    env.reset(0)
    env.size = len(rows)
    walls, targets, boxes, player = read("\n".join(rows))
    number = {(r, c): r * len(rows) + c for r in range(len(rows)) for c in range(len(rows))}
    env.boxes, env.floor = len(boxes), frozenset(n for cell, n in number.items() if cell not in walls)
    env.targets = sum(1 << number[cell] for cell in targets)
    env.state = sum(1 << number[cell] for cell in boxes) << 8 | number[player]
    env.lengths = plan_lengths(env.floor, env.targets, env.size)
    assert env.render() == "\n".join(rows)
    return env


# ------------------------------------------------------------------------------------------------ the protocol

@pytest.mark.parametrize("name", NAMES)
def test_protocol(name):
    env = make_env(name)
    obs, info = env.reset(5)
    assert isinstance(obs, str) and isinstance(info, dict) and obs
    assert isinstance(env.actions, tuple) and len(env.actions) == (2 if "bandit" in name else 4)
    assert (env.max_turns, env.max_actions_per_turn, env.max_actions) == (
        (1, 1, 1) if "bandit" in name else (5, 5, 10))
    assert env.success is False and isinstance(env.solve(), list) and isinstance(env.instruction, str)
    result = env.step(env.actions[0])
    assert [type(part) for part in result] == [str, float, bool, bool, dict]
    assert isinstance(env.success, bool) and result[4]["valid"] is True


@pytest.mark.parametrize("name", NAMES)
def test_budget_and_the_end(name):
    """Exactly one of terminated and truncated ends an episode, at the last allowed action at the latest; later steps
    change nothing and pay 0."""
    for seed, budget in product(range(15), (4, 10) if name == "sokoban-large" else (1, 3, 10)):
        env, rng = make_env(name, max_actions=budget), random.Random(seed)
        env.reset(seed)
        for number in range(1, budget + 1):
            obs, _, terminated, truncated, _ = env.step(rng.choice(env.actions))
            assert truncated == (number == budget and not terminated)
            if terminated or truncated:
                break
        end = obs, env.success
        for action in env.actions:
            assert env.step(action)[:4] == (obs, 0.0, terminated, truncated) and env.step(action)[4]["valid"] is False
        assert (env.render(), env.success) == end


def test_winning_with_the_last_action_terminates_and_is_not_truncated():
    for seed in range(40):
        env = make_env("sokoban")
        env.reset(seed)
        plan = env.solve()
        env.actions_left = len(plan)
        flags = [env.step(action)[1:4] for action in plan]
        assert flags[-1] == (10.9, True, False) and env.success and env.actions_left == 0
        assert all(flag[1:] == (False, False) for flag in flags[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_unknown_actions_change_nothing(name):
    for text in ("", "   ", "fly", "Up Up", "Up || Down", "U p", "</answer>", "Upp", "\x00"):
        env = make_env(name)
        obs, _ = env.reset(3)
        for _ in range(12):         # more often than there are actions: no budget is used
            assert env.step(text) == (obs, 0.0, False, False, {"valid": False, "success": False})
        assert env.actions_left == env.max_actions
        assert env.step(f"  {env.actions[0].upper()}\n")[4]["valid"] is True


# ------------------------------------------------------------------------------------------------ seeds

def fingerprint():
    """Levels, prompts and luck of all games as one hash."""
    lines = []
    for name, seed in product(NAMES, range(8)):
        env, rng = make_env(name), random.Random(seed)
        lines.append(env.reset(seed, {"noise_seed": seed + 7})[0] + env.instruction)
        while not (env.terminated or env.truncated):
            lines.append(repr(env.step(rng.choice(env.actions))[:4]))
        lines.append(env.demonstrate(rng, seed % 2 == 0))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_the_same_in_other_processes_and_global_random_state_untouched():
    states = random.getstate(), np.random.get_state()[1].tolist()
    mine = fingerprint()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    random.seed(99), np.random.seed(99)
    assert fingerprint() == mine            # and global state has no influence
    code = "import sys; sys.path[:0] = ['tests', '.']; from test_envs import fingerprint; print(fingerprint())"
    for salt in ("1", "777"):
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                             env={**os.environ, "PYTHONHASHSEED": salt})
        assert run.stdout.strip() == mine, run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_level_is_its_seed(name):
    """Neither the noise seed nor what was played before matters for the level; seeds differ; any size of seed works."""
    env, other = make_env(name), make_env(name)
    for seed in (0, 1, 17, 12345, 2**31, 2**63 + 1, np.int64(77)):
        first = env.reset(seed)[0]
        for noise in (0, seed, 10**12):
            assert other.reset(seed, options={"noise_seed": noise})[0] == first
            other.step(other.actions[noise % 2])
        assert (env.actions, env.instruction) == (other.actions, other.instruction)
    assert len({env.reset(seed)[0] for seed in range(60)}) >= (2 if "bandit" in name else 50)


def test_literal_levels():
    """What a seed means is part of every reported number: a change here changes them all."""
    assert make_env("sokoban").reset(3)[0] == SOKOBAN_3
    assert make_env("frozenlake").reset(3)[0] == LAKE_3
    assert [make_env("bandit").reset(seed)[0][0] for seed in range(12)] == list(BANDIT_ORDER)


def test_luck_depends_on_the_noise_seed_and_not_on_the_level():
    def slips(seed, noise):
        env = make_env("frozenlake", frozen=1.0, size=16, max_actions=20)
        env.reset(seed, {"noise_seed": noise})
        trail = [env.cell]
        for _ in range(20):
            env.step("Right")
            trail.append(env.cell)
        return tuple(trail)
    assert slips(5, 1) == slips(5, 1)
    assert len({slips(5, noise) for noise in range(30)}) >= 29
    # RAGEN draws map and slips from one stream: a hole in a given cell then fixes the first slip.
    seen, env = Counter(), make_env("frozenlake")
    for seed in range(900):
        env.reset(seed)                     # the default noise seed, too, is independent of the level
        third = int(env.luck.random() * 3)
        seen.update((number, letter == "H", third) for number, letter in enumerate("".join(env.lake)[:4]))
    for number, hole in product(range(4), (True, False)):
        counts = [seen[number, hole, third] for third in range(3)]
        assert all(abs(count / sum(counts) - 1 / 3) < 0.14 for count in counts), seen


# ------------------------------------------------------------------------------------------------ Sokoban

@pytest.mark.parametrize("grid, action, reward, after, solved", [
    ("##### #PXO# ##### ##### #####", "Right", 10.9, "##### #_P√# ##### ##### #####", True),
    ("##### #PXO# #OX_# #___# #####", "Right", 0.9, "##### #_P√# #OX_# #___# #####", False),      # one of two
    ("##### #P√_# #OX_# #___# #####", "Right", -1.1, "##### #_SX# #OX_# #___# #####", False),     # off its target
    ("###### #P√O_# #_O__# #_X__# #____# ######", "Right", -0.1, "###### #_S√_# #_O__# #_X__# #____# ######", False),
    ("##### #PX_# #__O# #___# #####", "Right", -0.1, "##### #_PX# #__O# #___# #####", False),     # a plain push
    ("##### #PX## #__O# #___# #####", "Right", -0.1, "##### #PX## #__O# #___# #####", False),     # against a wall
    ("###### #PXX_# #OO__# #____# #____# ######", "Right", -0.1, "###### #PXX_# #OO__# #____# #____# ######", False),
    ("##### #P__# #XO_# #___# #####", "Left", -0.1, "##### #P__# #XO_# #___# #####", False),      # into a wall
    ("##### #P__# #XO_# #___# #####", "Right", -0.1, "##### #_P_# #XO_# #___# #####", False),     # a walk
    ("##### #_P_# #XO_# #___# #####", "Down", -0.1, "##### #___# #XS_# #___# #####", False),      # onto the target
    ("##### #_P_# #_X_# #_O_# #####", "Down", 10.9, "##### #___# #_P_# #_√_# #####", True),
    ("##### #_O_# #_X_# #_P_# #####", "Up", 10.9, "##### #_√_# #_P_# #___# #####", True),
    ("##### #___# #OXP# #___# #####", "Left", 10.9, "##### #___# #√P_# #___# #####", True),
])
def test_sokoban_rewards(grid, action, reward, after, solved):
    env = place(grid)
    obs, paid, terminated, truncated, _ = env.step(action)
    assert obs == after.replace(" ", "\n")
    assert paid == pytest.approx(reward, abs=1e-12) and (terminated, truncated, env.success) == (solved, False, solved)


@pytest.mark.parametrize("overrides", [{}, {"boxes": 2}, {"boxes": 3, "size": 8}, {"boxes": 2, "size": 5}])
def test_sokoban_plays_as_the_slow_version_does(overrides):
    for seed in range(25 if overrides.get("boxes", 1) < 3 else 8):
        env, rng = make_env("sokoban", max_actions=60, **overrides), random.Random(seed)
        obs, _ = env.reset(seed)
        walls, targets, boxes, player = read(obs)
        for _ in range(60):
            action = rng.choice(env.actions)
            obs, reward, terminated, _, _ = env.step(action)
            boxes, player, paid, solved = slow_step(walls, targets, boxes, player, action)
            assert read(obs) == (walls, targets, boxes, player)
            assert reward == pytest.approx(paid, abs=1e-12) and terminated == solved == env.success
            if terminated:
                break


def test_running_out_of_moves_pays_no_bonus():
    env = place("##### #P__# #_XO# #___# #####")
    total = sum(env.step("Up")[1] for _ in range(10))
    assert total == pytest.approx(-1.0) and env.truncated and not env.success


def test_sokoban_levels():
    """Solvable within the budget, not solved, not trivial; measured by an independent search on the printed grid."""
    began, lengths = time.process_time(), []
    env = make_env("sokoban")
    for seed in range(1000):
        env.reset(seed)
    print(f"\n{1000 / (time.process_time() - began):.0f} levels a second")
    for seed in range(500):
        obs, _ = env.reset(seed)
        walls, targets, boxes, player = read(obs)
        assert [len(line) for line in obs.split("\n")] == [6] * 6
        assert all((r, c) in walls for r, c in product(range(6), range(6)) if {r, c} & {0, 5})
        assert len(boxes) == len(targets) == 1 and not boxes & targets and player not in targets
        lengths.append(slow_plan_length(obs))
        assert len(env.solve()) == lengths[-1]
    print(f"shortest plans {statistics.mean(lengths):.2f} moves on average, {Counter(lengths)}")
    assert min(lengths) >= 1 and max(lengths) <= 10
    assert statistics.mean(lengths) >= 3.5 and sum(length >= 8 for length in lengths) >= 0.03 * len(lengths)
    success = statistics.mean(random_success(env, seed, 4) for seed in range(500))
    print(f"random play solves {success:.3f}")
    assert 0.15 <= success <= 0.25


@pytest.mark.parametrize("overrides", [{"size": 8, "boxes": 2}, {"boxes": 3}, {"max_actions": 4}, {"max_actions": 1},
                                       {"size": 5}, {"size": 12}, {"max_actions": 30}])
def test_variants_of_sokoban_levels(overrides):
    env = make_env("sokoban", **overrides)
    for seed in range(25):
        obs, _ = env.reset(seed)
        _, targets, boxes, player = read(obs)
        assert len(boxes) == len(targets) == env.boxes and not targets & (boxes | {player})
        length = len(env.solve())
        assert 1 <= length <= min(10, env.max_actions)
        if env.boxes < 3:
            assert length == slow_plan_length(obs)


def test_a_larger_budget_leaves_the_levels_as_they_are():
    few, many = make_env("sokoban"), make_env("sokoban", max_actions=35)
    assert all(few.reset(seed)[0] == many.reset(seed)[0] for seed in range(50))


@pytest.mark.parametrize("name", ["sokoban", "sokoban-large"])
def test_sokoban_solver_is_exact_from_any_state(name):
    lost = 0
    for seed in range(40 if name == "sokoban" else 10):
        env, rng = make_env(name, max_actions=100), random.Random(seed)
        env.reset(seed)
        for _ in range(12):
            obs, _, over, _, _ = env.step(rng.choice(env.actions))
            if over:
                assert env.solve() == []
                break
            plan, length = env.solve(), slow_plan_length(obs)
            assert (None if plan is None else len(plan)) == length
            lost += plan is None
            if plan and rng.random() < 0.3:         # and the plan is one
                walls, targets, boxes, player = read(obs)
                for action in plan:
                    boxes, player, _, solved = slow_step(walls, targets, boxes, player, action)
                assert solved
    assert lost


def test_newvocab_is_the_same_game_and_its_legend_is_true():
    """The grid translated by the printed legend is the ordinary grid."""
    def legend(env):
        line = next(line for line in env.instruction.split("\n") if line.startswith("Legend: "))
        return {part[0]: part[2:] for part in line.removeprefix("Legend: ").removesuffix(".").split(", ")}
    plain, new = make_env("sokoban"), make_env("sokoban-newvocab")
    for seed in range(50):
        rng = random.Random(seed)
        grids = [plain.reset(seed)[0], new.reset(seed)[0]]
        while True:
            meanings, symbols = legend(new), {meaning: symbol for symbol, meaning in legend(plain).items()}
            assert grids[0] == "".join(symbols[meanings[s]] if s != "\n" else s for s in grids[1])
            assert grids[0] != grids[1]
            if plain.terminated or plain.truncated:
                break
            action = rng.choice(plain.actions)
            grids = [plain.step(action)[0], new.step(action)[0]]
    assert legend(new) == {"W": "wall", ".": "floor", "G": "target", "C": "box on target", "B": "box", "A": "player",
                           "@": "player on target"}
    assert legend(plain) == {"#": "wall", "_": "floor", "O": "target", "√": "box on target", "X": "box", "P": "player",
                             "S": "player on target"}


# ------------------------------------------------------------------------------------------------ FrozenLake

# Gymnasium's FrozenLake-v1 on its own 4x4 map: for each open state, the next states of Left, Down, Right, Up.
GYMNASIUM_MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
GYMNASIUM = {
    0: [(0, 0, 4), (0, 4, 1), (4, 1, 0), (1, 0, 0)], 1: [(1, 0, 5), (0, 5, 2), (5, 2, 1), (2, 1, 0)],
    2: [(2, 1, 6), (1, 6, 3), (6, 3, 2), (3, 2, 1)], 3: [(3, 2, 7), (2, 7, 3), (7, 3, 3), (3, 3, 2)],
    4: [(0, 4, 8), (4, 8, 5), (8, 5, 0), (5, 0, 4)], 6: [(2, 5, 10), (5, 10, 7), (10, 7, 2), (7, 2, 5)],
    8: [(4, 8, 12), (8, 12, 9), (12, 9, 4), (9, 4, 8)], 9: [(5, 8, 13), (8, 13, 10), (13, 10, 5), (10, 5, 8)],
    10: [(6, 9, 14), (9, 14, 11), (14, 11, 6), (11, 6, 9)], 13: [(9, 12, 13), (12, 13, 14), (13, 14, 9), (14, 9, 12)],
    14: [(10, 13, 14), (13, 14, 15), (14, 15, 10), (15, 10, 13)],
}


def test_lake_table_is_gymnasiums():
    table = lake_transitions(GYMNASIUM_MAP)
    assert len(table) == 16
    for state, actions in enumerate(table):
        assert len(actions) == 4
        for action, outcomes in enumerate(actions):
            if state in (5, 7, 11, 12, 15):
                assert outcomes == [(1.0, state, 0.0, True)]
                continue
            assert [outcome[0] for outcome in outcomes] == pytest.approx([1 / 3] * 3)
            expected = [(cell, float(cell == 15), cell in (5, 7, 11, 12, 15)) for cell in GYMNASIUM[state][action]]
            assert [outcome[1:] for outcome in outcomes] == expected


def test_lake_values_of_gymnasiums_map():
    """Undiscounted, without a time limit, its optimum is 14/17; the best first action is Left."""
    table, values = lake_values(GYMNASIUM_MAP, 1 / 3, 500)
    assert table == lake_transitions(GYMNASIUM_MAP)
    assert values[-1][0] == (pytest.approx(14 / 17, abs=1e-4), 0)
    assert values[1][14][0] == pytest.approx(1 / 3) and values[0][14][0] == 0
    assert values[1][0][0] == 0 and values[6][0][0] > 0 and values[5][0][0] == 0     # the goal is 6 steps away
    straight = lake_values(GYMNASIUM_MAP, 0, 6)[1]
    assert straight[6][0] == (1.0, 1) and straight[5][0][0] == 0


def test_lake_plays_by_its_table():
    """1/3 to each side, 1/3 straight on, never backwards."""
    turns = {"Left": ["Up", "Left", "Down"], "Down": ["Left", "Down", "Right"], "Right": ["Down", "Right", "Up"],
             "Up": ["Right", "Up", "Left"]}
    for action, ways in turns.items():
        seen, env = Counter(), make_env("frozenlake", frozen=1.0, size=6)
        for seed, noise in product((0, 3, 6), range(400)):
            env.reset(seed, {"noise_seed": 400 * seed + noise})
            row, col = divmod(env.cell, 6)
            assert 0 < row < 5 and 0 < col < 5
            env.step(action)
            seen[(env.cell // 6 - row, env.cell % 6 - col)] += 1
        assert set(seen) == {STEP[way] for way in ways}
        total = sum(seen.values())
        assert total == 1200 and all(abs(count / total - 1 / 3) < 0.06 for count in seen.values()), seen


def test_lake_without_slip_and_its_ends():
    env, outcomes = make_env("frozenlake", slip=0.0), Counter()
    for seed in range(150):
        env.reset(seed)
        assert env.optimal_success() == 1.0
        rng = random.Random(seed)
        while not (env.terminated or env.truncated):
            row, col = divmod(env.cell, 4)
            action = rng.choice(env.actions)
            obs, reward, *_ = env.step(action)
            row, col = min(max(row + STEP[action][0], 0), 3), min(max(col + STEP[action][1], 0), 3)     # walls hold
            assert divmod(env.cell, 4) == (row, col)
            symbol = obs.split("\n")[row][col]
            letter = env.lake[row][col]
            assert symbol == {"F": "P", "S": "P", "H": "X", "G": "√"}[letter]
            assert reward == (letter == "G") == env.success and env.terminated == (letter in "GH")
            assert obs.count("G") == (letter != "G")
        outcomes[symbol, env.terminated, env.truncated, env.success] += 1
    assert set(outcomes) == {("P", False, True, False), ("X", True, False, False), ("√", True, False, True)}


def test_lake_levels():
    env, ice, holes = make_env("frozenlake"), 0, 0
    for seed in range(500):
        obs, _ = env.reset(seed)
        rows = obs.split("\n")
        assert [len(row) for row in rows] == [4] * 4 and set(obs) <= set("_OGP\n")
        assert obs.count("P") == obs.count("G") == 1
        start = next((r, c) for r in range(4) for c in range(4) if rows[r][c] == "P")
        reached, edge = {start}, [start]
        for r, c in edge:
            for dr, dc in STEP.values():
                cell = r + dr, c + dc
                if min(cell) >= 0 and max(cell) < 4 and cell not in reached and rows[cell[0]][cell[1]] != "O":
                    reached.add(cell)
                    edge.append(cell)
        assert any(rows[r][c] == "G" for r, c in reached)
        ice, holes = ice + obs.count("_"), holes + obs.count("O")
    assert 0.76 < ice / (ice + holes) < 0.86
    success = statistics.mean(random_success(env, seed, 4) for seed in range(500))
    print(f"\nrandom play on ice succeeds {success:.3f}")
    assert 0.19 <= success <= 0.25


def test_lake_solver_against_slow_induction():
    for seed in range(25):
        env = make_env("frozenlake", max_actions=6)
        obs, _ = env.reset(seed)
        rows = obs.replace("P", "_").split("\n")

        @lru_cache(None)
        def value(r, c, left, rows=tuple(rows)):
            if rows[r][c] in "OG" or left == 0:
                return float(rows[r][c] == "G")
            return max(after(r, c, left, action) for action in STEP)

        def after(r, c, left, action):
            side = ("Left", "Right") if action in ("Up", "Down") else ("Up", "Down")
            ways = [STEP[way] for way in (action, *side)]
            return sum(value(min(max(r + dr, 0), 3), min(max(c + dc, 0), 3), left - 1) for dr, dc in ways) / 3

        assert env.optimal_success() == pytest.approx(value(*divmod(env.cell, 4), 6))
        for cell, left in product(range(16), range(1, 7)):           # the budget left counts, not the whole one
            if rows[cell // 4][cell % 4] not in "OG":
                env.cell, env.actions_left = cell, left
                plan, here = env.solve(), divmod(cell, 4)
                assert len(plan) == 1 and after(*here, left, plan[0]) == pytest.approx(value(*here, left))


def test_playing_the_lake_solver_reaches_the_optimum_and_no_more():
    env, won, best = make_env("frozenlake"), 0, 0
    for seed in range(600):
        env.reset(seed, {"noise_seed": seed + 1})
        best += env.optimal_success()
        while not (env.terminated or env.truncated):
            env.step(env.solve()[0])
        won += env.success
    assert abs(won - best) / 600 < 0.05 and 0.45 < best / 600 < 0.55


# ------------------------------------------------------------------------------------------------ Bandit

@pytest.mark.parametrize("name, low, high", [("bandit", "Phoenix", "Dragon"), ("bandit-test", "Librarian", "Trader"),
                                             ("bandit-rev", "Trader", "Librarian")])
def test_bandit(name, low, high):
    env, paid, orders = make_env(name), Counter(), Counter()
    assert set(env.actions) == {low, high}
    for seed in range(1200):
        obs, _ = env.reset(seed, {"noise_seed": seed + 5})
        assert obs.split("\n") == list(env.actions) and sorted(env.actions) == sorted((low, high))
        assert env.solve() == [high] and env.optimal_success() == 1.0
        orders[env.actions] += 1
        after, reward, terminated, truncated, _ = env.step(high)
        assert (after, terminated, truncated, env.success) == (obs, True, False, True)
        paid[reward] += 1
        env.reset(seed)
        assert env.step(low)[1:4] == (0.15, True, False) and env.success is False
    assert set(paid) == {0.0, 1.0} and abs(paid[1.0] / 1200 - 0.25) < 0.05
    assert all(abs(count / 1200 - 0.5) < 0.06 for count in orders.values()) and len(orders) == 2


def test_bandit_success_is_the_higher_mean_whatever_it_paid():
    env = make_env("bandit", low_reward=0.35)
    env.reset(0)
    assert env.solve() == ["Phoenix"] and env.step("Phoenix")[1] == 0.35 and env.success
    env.reset(0)
    env.step("Dragon")
    assert not env.success
    even = make_env("bandit", low_reward=0.25)
    for arm in ("Phoenix", "Dragon"):
        even.reset(0)
        even.step(arm)
        assert even.success
    env = make_env("bandit", arms=["Nurse", "Pilot"], high_reward=2, high_prob=1.0)
    env.reset(1)
    assert env.step("pilot")[1] == 2.0 and env.success and "Nurse" in env.instruction


def test_bandit_luck_is_independent_of_the_order_and_of_other_members():
    """Members of a group (one level, many noise seeds) get independent payouts."""
    env = make_env("bandit")
    shares = []
    for seed in range(40):
        paid = []
        for noise in range(40):
            env.reset(seed, {"noise_seed": 1000 * seed + noise})
            paid.append(env.step("Dragon")[1])
        shares.append(statistics.mean(paid))
    assert 0.2 < statistics.mean(shares) < 0.3 and 0.04 < statistics.stdev(shares) < 0.1     # binomial: 0.068


# ------------------------------------------------------------------------------------------------ baselines, prompts

def test_random_success():
    assert random_success(make_env("bandit"), 3, draws=400) == pytest.approx(0.5, abs=0.1)
    env = make_env("sokoban")
    assert random_success(env, 5) == random_success(env, 5)                # a function of the level
    easy = make_env("frozenlake", size=2, frozen=1.0, slip=0.0, max_actions=100)
    assert random_success(easy, 0, draws=8) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_prompts(name):
    env = make_env(name)
    obs, _ = env.reset(1)
    prompt = first_prompt(env, obs)
    assert prompt.endswith("\n" + obs) and prompt.startswith(env.instruction) and "<think>" in prompt
    assert ("action || action</answer>" in prompt) == ("bandit" not in name)
    assert f"Actions: {', '.join(env.actions)}." in env.instruction
    limits = env.max_turns, env.max_actions_per_turn, env.max_actions
    assert "Limits: turns {}, actions per turn {}, actions in all {}.".format(*limits) in env.instruction
    assert f"Turn 1 of {env.max_turns}, {env.max_actions} action" in prompt
    alone = first_prompt(env, obs, think=False)
    assert "think>" not in alone and "<answer>" in alone
    assert len(env.instruction.split()) <= 90
    shown = make_env(name, max_turns=3, max_actions_per_turn=2, max_actions=6)
    obs, _ = shown.reset(1)
    assert "Limits: turns 3, actions per turn 2, actions in all 6." in shown.instruction
    assert "Turn 1 of 3, 6 actions left." in first_prompt(shown, obs)


def test_the_legend_lists_every_symbol_that_can_appear():
    for name in ("sokoban", "sokoban-large", "sokoban-newvocab", "frozenlake"):
        env, seen = make_env(name), set()
        for seed in range(80):
            seen |= set(env.reset(seed)[0])
            rng = random.Random(seed)
            while not (env.terminated or env.truncated):
                seen |= set(env.step(rng.choice(env.actions))[0])
        legend = env.instruction.split("Legend: ")[1].split("\n")[0].removesuffix(".")
        assert {part[0] for part in legend.split(", ")} == set(env.symbols) >= seen - {"\n"}
    env = make_env("frozenlake", slip=0.1)
    env.reset(0)
    assert "chance 0.10 each" in env.instruction


def test_next_prompt():
    env = make_env("sokoban")
    obs, _ = env.reset(0)
    assert next_prompt(env, obs, 0.9, True, 2, 7) == f"Reward 0.90.\nTurn 2 of 5, 7 actions left.\n{obs}"
    assert next_prompt(env, obs, -0.1 - 0.1 - 0.1, True, 5, 1) == f"Reward -0.30.\nTurn 5 of 5, 1 action left.\n{obs}"
    assert next_prompt(env, obs, -0.001, True, 2, 7).startswith("Reward 0.00.\n")
    first, second, *_ = next_prompt(env, obs, 0.0, False, 3, 10).split("\n")
    assert first == "Reward 0.00. No valid action, so nothing happened." and second == "Turn 3 of 5, 10 actions left."


# ------------------------------------------------------------------------------------------------ demonstrations

def dialogue(env, seed, careful, think=True):
    """Play demonstrations to the end -> [(obs before, reply)]"""
    obs, rng, turns = env.reset(seed, {"noise_seed": seed})[0], random.Random(seed), []
    while not (env.terminated or env.truncated) and len(turns) < env.max_turns:
        reply = env.demonstrate(rng, careful, think)
        parsed = parse_response(opening_tag(think) + reply, env.actions, env.max_actions_per_turn, think)
        assert parsed.valid and parsed.surplus == 0 and reply.endswith("</answer>")
        assert bool(parsed.thought) == think and 1 <= len(parsed.actions) <= env.actions_left
        turns.append((obs, reply, parsed))
        for action in parsed.actions:
            obs = env.step(action)[0]
    return turns


@pytest.mark.parametrize("name, careful, think", list(product(NAMES, (True, False), (True, False))))
def test_demonstrations_are_valid_and_end_in_time(name, careful, think):
    for overrides in ({}, {"max_actions_per_turn": 1}, {"max_actions": 4}):
        env = make_env(name, **overrides)
        for seed in range(15):
            dialogue(env, seed, careful, think)


def test_careful_demonstrations_win_and_vague_ones_play_at_random():
    share = {}
    for name, careful, n in product(("sokoban", "sokoban-large", "frozenlake", "bandit"), (True, False), (120,)):
        env = make_env(name)
        share[name, careful] = statistics.mean((dialogue(env, seed, careful), env.success)[1] for seed in range(n))
    print("\n", share)
    assert share["sokoban", True] == share["sokoban-large", True] == 1.0
    assert share["sokoban", False] < 0.3 and share["sokoban-large", False] < 0.1
    assert share["frozenlake", True] > share["frozenlake", False] + 0.1
    assert 0.4 < share["bandit", True] < 0.6 and 0.4 < share["bandit", False] < 0.6


def test_careful_sokoban_thoughts_are_true():
    checked = lost = 0
    for name, seed in product(("sokoban", "sokoban-large"), range(80)):
        env, rng = make_env(name), random.Random(seed)
        obs, _ = env.reset(seed)
        for _ in range(4):
            reply = env.demonstrate(rng, careful=True)
            thought, actions = reply.split("</think>")[0], parse_response("<think>" + reply, env.actions, 5).actions
            walls, targets, boxes, player = read(obs)
            if slow_plan_length(obs) is None if name == "sokoban" else env.solve() is None:
                lost += 1
                assert not any(char.isdigit() for char in thought) and ("not win" in thought or "can not go" in thought)
            else:
                at = {who: tuple(map(int, re.search(rf"{who} (?:is |am )?at (\d) (\d)", thought).groups()))
                      for who in ("I am", "box is", "target is")}
                me, box, target = (at[who] for who in ("I am", "box is", "target is"))
                assert me == player and box in boxes and target in targets
                moves = dict(re.findall(r"(Up|Down|Left|Right) (\d)", re.search(r" go ((?:\w+ \d ?)+)\.", thought)[1]))
                assert all(int(moves.get(way, 0)) >= 0 for way in STEP)
                shift = [sum(STEP[way][axis] * int(count) for way, count in moves.items()) for axis in (0, 1)]
                assert (box[0] + shift[0], box[1] + shift[1]) == target
                plan = env.solve()
                assert actions == plan[:5] and 15 <= len(re.findall(r"\w+|[^\w\s]", thought)) <= 60
                pushes, first, state = [], None, (boxes, player)
                for action in plan:
                    new = slow_step(walls, targets, *state, action)[:2]
                    if new[0] != state[0]:
                        pushes.append(action)
                        first = first or state[1]
                    state = new
                stand = re.search(r"(?:From|from|go to|First to) (\d) (\d)", thought.split(". ", 1)[1])
                assert tuple(map(int, stand.groups())) == first
                assert " ".join(pushes) in thought.split(". ", 1)[1]
                checked += 1
            obs, _, terminated, truncated, _ = env.step(rng.choice(env.actions))
            if terminated or truncated:
                break
    assert checked > 200 and lost > 10


def test_careful_lake_thoughts_are_true():
    holes_named = 0
    for seed in range(200):
        env = make_env("frozenlake")
        for obs, reply, parsed in dialogue(env, seed, careful=True):
            rows, thought = obs.split("\n"), reply.split("</think>")[0]
            where = {symbol: (r, c) for r in range(4) for c in range(4) for symbol in rows[r][c] if symbol in "PG"}
            r, c = where["P"]
            assert f"I am at {r} {c}" in thought and "the goal is at {} {}".format(*where["G"]) in thought
            near = [(r + dr, c + dc) for dr, dc in STEP.values() if 0 <= r + dr < 4 and 0 <= c + dc < 4]
            holes = sorted(f"{a} {b}" for a, b in near if rows[a][b] == "O")
            assert (f"next to me a hole is at {' and '.join(holes)}" if holes else "no hole is next to me") in thought
            holes_named += bool(holes)
            assert thought.endswith(" then ".join(parsed.actions) + ".")
    assert holes_named > 50


def test_lake_demonstrations_start_with_the_best_action():
    env, rng = make_env("frozenlake"), random.Random(0)
    for seed in range(60):
        env.reset(seed)
        parsed = parse_response("<think>" + env.demonstrate(rng, careful=True), env.actions, 5)
        assert parsed.actions[:1] == env.solve() and len(parsed.actions) == 2


def test_bandit_thoughts_name_the_arm_that_is_pulled():
    env, picked, texts = make_env("bandit"), Counter(), set()
    for seed, careful in product(range(400), (True, False)):
        env.reset(seed)
        thought, answer = env.demonstrate(random.Random(seed), careful).split("</think><answer>")
        arm = answer.removesuffix("</answer>")
        other = ({"Phoenix", "Dragon"} - {arm}).pop()
        assert arm in thought and (other not in thought or thought.endswith((f"{arm} sounds better than {other}.",
                                                                             f"{other} sounds bad, I take {arm}.")))
        picked[arm, careful] += 1
        texts.add(thought.split(" ", 1)[1].replace(arm, "A").replace(other, "B"))
    assert len(texts) >= 7 and all(abs(count / 400 - 0.5) < 0.1 for count in picked.values()), picked


@pytest.mark.parametrize("name, most", [("sokoban", 3), ("frozenlake", 2)])
def test_thoughts_vary_and_their_first_words_do_not_tell_the_kind(name, most):
    env, firsts, texts, lengths, actions = make_env(name), {}, {}, Counter(), Counter()
    for seed, careful in product(range(400), (True, False)):
        env.reset(seed % 7)
        reply = env.demonstrate(random.Random(seed), careful)
        thought = reply.split("</think>")[0]
        assert len(reply.split("</think>")) == 2 and "<" not in thought
        firsts.setdefault(careful, Counter())[thought.split()[0]] += 1
        texts.setdefault((careful, seed % 7), set()).add(thought)
        if not careful:
            assert not any(char.isdigit() for char in thought)
            parsed = parse_response("<think>" + reply, env.actions, 5)
            lengths[len(parsed.actions)] += 1
            actions.update(parsed.actions)
    assert all(len(found) >= 30 for found in texts.values())
    assert set(firsts[True]) == set(firsts[False]) and len(firsts[True]) >= 5
    assert max(firsts[True].values()) < 120 > max(firsts[False].values())
    assert set(lengths) == set(range(1, most + 1)) and min(lengths.values()) > 80
    assert len(actions) == 4 and min(actions.values()) > 0.2 * sum(actions.values())


def test_the_vocabulary_is_small():
    words = set()
    for name in ("bandit", "sokoban", "frozenlake"):
        env = make_env(name)
        for seed in range(60):
            for careful, think in product((True, False), (True, False)):
                text = first_prompt(env, env.reset(seed)[0], think)
                for obs, reply, _ in dialogue(env, seed, careful, think):
                    text += "\n" + next_prompt(env, obs, 0.0, careful, 2, env.actions_left) + " " + reply
                lines = [line for line in text.split("\n") if not set(line) <= set("#_O√XPSG")]
                words |= set(re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]", "\n".join(lines)))
    assert len(words) < 200, len(words)


# ------------------------------------------------------------------------------------------------ settings

@pytest.mark.parametrize("name, overrides, words", [
    ("sokoban", {"sise": 8}, ["sise", "size", "boxes", "max_actions"]),
    ("sokoban", {"size": 3}, ["size=3", "5", "12"]), ("sokoban", {"size": "8"}, ["size='8'", "int"]),
    ("sokoban", {"boxes": 0}, ["boxes=0"]), ("sokoban", {"symbols": "#_O"}, ["symbols='#_O'", "7"]),
    ("sokoban", {"symbols": "##O√XPS"}, ["symbols="]), ("sokoban", {"max_turns": 0}, ["max_turns=0"]),
    ("sokoban", {"max_actions": 2.5}, ["max_actions=2.5", "int"]),
    ("frozenlake", {"slip": 0.7}, ["slip=0.7", "0.5"]), ("frozenlake", {"frozen": -1}, ["frozen=-1"]),
    ("frozenlake", {"arms": ("a", "b")}, ["arms", "slip"]),
    ("bandit", {"arms": ("a",)}, ["arms=", "(low, high)"]), ("bandit", {"arms": ("a", "a")}, ["arms="]),
    ("bandit", {"arms": "ab"}, ["arms='ab'", "tuple"]), ("bandit", {"low_reward": "x"}, ["low_reward='x'", "float"]),
    ("chess", {}, ["chess", "path/to/file.py:Class", *NAMES]), ("", {}, NAMES), ("sokoban:Class", {}, NAMES),
])
def test_bad_settings_name_themselves_and_what_is_allowed(name, overrides, words):
    with pytest.raises(ValueError) as error:
        make_env(name, **overrides)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_impossible_levels_are_an_error_not_a_hang():
    env = make_env("sokoban", size=5, boxes=3, max_actions=1)
    with pytest.raises(ValueError, match="size=5 with boxes=3"):
        env.reset(0)


def test_overrides_belong_to_one_environment():
    make_env("sokoban", symbols="W.GCBA@", max_actions=3)
    assert make_env("sokoban").symbols == "#_O√XPS" and make_env("sokoban").max_actions == 10
    assert make_env("frozenlake", slip=0).slip == 0.0


# ------------------------------------------------------------------------------------------------ a user's own

USER = '''
import math                       # module-level names must stay usable after loading
START = math.floor(3.7)

class Count:
    """Count down to zero."""
    actions = ("Down", "Stay")
    max_actions = 6
    def __init__(self, start=START):
        self.start = start
    def reset(self, seed):
        self.n = START + seed % 2
        return str(self.n), {"seed": seed}
    def step(self, action):
        self.n -= action == "Down"
        return str(self.n), 1.0 if self.n == 0 else -0.25, self.n == 0, False, {"n": self.n}

class Full(Count):
    instruction, success = "Count down.", False
    max_turns, max_actions_per_turn = 4, 2
    def reset(self, seed, options=None):
        self.noise = options["noise_seed"]
        self.success = False
        return super().reset(seed)
    def step(self, action):
        result = super().step(action)
        self.success = self.n == 0
        return result
    def solve(self):
        return ["Down"] * self.n
    def optimal_success(self):
        return 0.5
    def demonstrate(self, rng, careful, think=True):
        return "n</think><answer>Down</answer>"

class Gym(Count):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed + options["noise_seed"])

class Talk:
    def reset(self, seed):
        return "say the word", {}
    def step(self, text):
        return f"you said {text}", float(text == "open || sesame"), text == "open || sesame", False, None

class Stops(Count):
    def step(self, action):
        return (*super().step(action)[:3], True, {})

class NoStep:
    def reset(self, seed):
        return "", {}

class NoReset:
    def step(self, action):
        return "", 0.0, True, False, {}

class BadReset(Count):
    def reset(self, seed):
        return "only the state"

class BadStep(Count):
    def step(self, action):
        return "state", 0.0, True, {}

class BadObs(Count):
    def reset(self, seed):
        return 3, {}

from envs import Env, LEVEL, stream

class Guess(Env):
    rules, actions, max_turns = "Guess the coin.", ("Heads", "Tails"), 2
    settings = Env.settings | {"prize": (0, 10)}
    prize = 1
    def start(self, seed):
        self.coin = stream(seed, LEVEL).choice(self.actions)
    def act(self, action):
        self.success = action == self.coin
        return self.prize * self.success, self.success
    def render(self):
        return "a coin"
    def solve(self):
        return [self.coin]

class Shaped(Guess):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward - 0.5, terminated, truncated, info
'''


@pytest.fixture
def user(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(USER)
    return lambda name, **overrides: make_env(f"{path}:{name}", **overrides)


def test_user_environment_with_defaults(user):
    env = user("Count")
    obs, info = env.reset(0)
    assert obs == "3" and info == {"seed": 0} and env.actions == ("Down", "Stay")
    assert (env.max_turns, env.max_actions_per_turn, env.max_actions) == (5, 5, 6)
    assert env.solve() is None and env.optimal_success() is None
    assert "Actions: Down, Stay." in env.instruction and "actions in all 6." in env.instruction
    assert first_prompt(env, obs).endswith("\n3")
    assert env.step("stay") == ("3", -0.25, False, False, {"n": 3, "valid": True, "success": False})
    assert env.step("jump")[1:4] == (0.0, False, False) and env.actions_left == 5
    results = [env.step("Down") for _ in range(3)]
    assert results[-1][:4] == ("0", 1.0, True, False) and env.success          # -0.75 + 1 > 0
    assert env.step("Down")[:4] == ("0", 0.0, True, False)
    env.reset(1)
    assert not env.success
    flags = [env.step("Stay")[2:4] for _ in range(7)]
    assert flags == [(False, False)] * 5 + [(False, True)] * 2 and not env.success
    assert 0 <= random_success(env, 0) <= 1
    for careful, think in product((True, False), (True, False)):
        env.reset(0)
        reply = env.demonstrate(random.Random(0), careful, think)
        assert parse_response(opening_tag(think) + reply, env.actions, 5, think).valid


def test_user_environment_with_everything(user):
    env = user("Full", max_actions=8)
    env.reset(1, {"noise_seed": 42})
    assert env.inner.noise == 42 and env.solve() == ["Down"] * 4 and env.optimal_success() == 0.5
    assert (env.max_turns, env.max_actions_per_turn, env.max_actions, env.inner.max_actions) == (4, 2, 8, 8)
    assert env.instruction.startswith("Count down.\nActions: Down, Stay.\nLimits: turns 4, actions per turn 2")
    assert env.demonstrate(random.Random(0), True) == "n</think><answer>Down</answer>"
    for _ in range(4):
        env.step("Down")
    assert env.success and env.terminated
    env.reset(1)
    assert not env.success and env.inner.noise == 1
    gym = user("Gym")
    assert gym.reset(2, {"noise_seed": 1})[0] == "4" and gym.reset(2, {"noise_seed": 2})[0] == "3"
    assert user("Count", start=9).inner.start == 9


def test_user_environment_may_truncate(user):
    env = user("Stops")
    env.reset(0)
    assert env.step("Stay")[2:4] == (False, True) and env.step("Down")[:2] == ("3", 0.0)


def test_user_environment_with_free_text(user):
    env = user("Talk")
    obs, _ = env.reset(0)
    assert env.actions == () and "<answer>your text</answer>" in first_prompt(env, obs)
    assert "Actions:" not in env.instruction and random_success(env, 0) is None
    parsed = parse_response("<think></think><answer> open || sesame\n</answer>", env.actions, 1)
    assert parsed.actions == ["open || sesame"] and parsed.valid
    assert env.step("  ")[4]["valid"] is False
    assert env.step("Hello")[:4] == ("you said Hello", 0.0, False, False)       # not lower-cased
    assert env.success is False                 # rewards of 0 are none
    assert env.step(parsed.actions[0])[1:4] == (1.0, True, False) and env.success
    env.reset(0)
    assert parse_response("<think>" + env.demonstrate(random.Random(1), False), (), 5).valid


def test_user_environment_may_subclass_env(user):
    for name, reward in (("Guess", 3.0), ("Shaped", 2.5)):
        env = user(name, prize=3, max_actions=2)
        assert env.reset(4)[0] == "a coin"
        assert env.instruction.count("Limits:") == env.instruction.count("Actions:") == 1
        assert env.instruction.startswith("Guess the coin.\nActions: Heads, Tails.\nLimits: turns 2,")
        plan = env.solve()
        wrong = ({"Heads", "Tails"} - set(plan)).pop()
        assert env.step(wrong)[1:4] == (reward - 3, False, False) and env.step(wrong)[2:4] == (False, True)
        env.reset(4)
        assert env.step(plan[0])[1:4] == (reward, True, False) and env.success
        assert env.optimal_success() == 1.0


@pytest.mark.parametrize("name, words", [("NoStep", "step"), ("NoReset", "reset"), ("Missing", "Missing"),
                                         ("START", "reset")])
def test_user_class_must_be_there_and_complete(user, name, words):
    with pytest.raises(ValueError, match=words):
        user(name)


@pytest.mark.parametrize("name, overrides", [("Count", {"sise": 3}), ("Guess", {"sise": 3}), ("Guess", {"prize": 11}),
                                             ("Count", {"max_turns": 0})])
def test_user_class_overrides_are_checked(user, name, overrides):
    with pytest.raises(ValueError, match=f"{name}|own.py.*{list(overrides)[0]}"):
        user(name, **overrides)


def test_user_file_errors_are_one_line(tmp_path):
    broken = tmp_path / "broken.py"
    for text in ("def oops(:", "import not_a_module_at_all", "1 / 0"):
        broken.write_text(text)
        with pytest.raises(ValueError, match="broken.py") as error:
            make_env(f"{broken}:Env")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="nowhere.py"):
        make_env(f"{tmp_path}/nowhere.py:Env")


def test_user_return_values_are_checked(user):
    for name, words in (("BadReset", "BadReset.reset -> .obs, info. expected"), ("BadObs", "obs a str")):
        with pytest.raises(ValueError, match=words):
            user(name).reset(0)
    env = user("BadStep")
    env.reset(0)
    with pytest.raises(ValueError, match="BadStep.step -> .obs, reward, terminated, truncated, info. expected"):
        env.step("Stay")


# ------------------------------------------------------------------------------------------------ running alone

def test_doctests():
    failed, tried = doctest.testmod(envs)
    assert failed == 0 and tried >= 4


def run_alone(*flags, typed=""):
    return subprocess.run([sys.executable, "envs.py", *flags], cwd=ROOT, input=typed, capture_output=True, text=True,
                          env={**os.environ, "PYTHONIOENCODING": "utf-8"}, encoding="utf-8")


def test_play_in_the_terminal():
    env = make_env("sokoban")
    obs, _ = env.reset(3)
    plan = env.solve()
    won = run_alone("--env", "sokoban", "--seed", "3", typed="h\nfly\n" + " || ".join(plan).lower() + "\n")
    assert won.returncode == 0 and obs in won.stdout and env.instruction in won.stdout and str(plan) in won.stdout
    assert "no such action" in won.stdout and "reward 10.90" in won.stdout and won.stdout.endswith("\nsolved\n")
    for typed in ("", "q\n", "Up\nq\n"):        # end of input and q end cleanly
        left = run_alone(typed=typed)
        assert left.returncode == 0 and left.stdout.endswith("not solved\n") and not left.stderr
    bad = run_alone("--env", "chess")
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and "sokoban-newvocab" in bad.stderr


SOKOBAN_3 = "######\n##___#\n#____#\n##PXO#\n##__##\n######"
LAKE_3 = "G__O\n__OP\n____\n____"
BANDIT_ORDER = "DPDPPDPPDDDD"


def test_baselines_know_what_an_episode_has_room_for():
    """Two actions in all, as one turn of two: optimum and random play are those of two actions."""
    for name in ("sokoban", "frozenlake"):
        wide, tight, two = (make_env(name, **limits) for limits in ({}, dict(max_turns=1, max_actions_per_turn=2),
                                                                    dict(max_turns=2, max_actions_per_turn=1)))
        for seed in range(30):
            for env in (wide, tight, two):
                env.reset(seed)
            assert tight.optimal_success() == two.optimal_success() <= wide.optimal_success()
            if name == "sokoban":
                assert tight.optimal_success() == (len(tight.solve()) <= 2)
            assert random_success(tight, seed) == random_success(two, seed)
        played = [sum(random_success(env, seed) for seed in range(30)) for env in (tight, wide)]
        assert played[0] < played[1]
        assert any(wide.reset(s) and tight.reset(s) and tight.optimal_success() < wide.optimal_success() for s in range(30))


def test_a_users_reset_with_keywords_gets_its_luck(tmp_path):
    """reset(seed, **kwargs) is given options as reset(seed, options) is; reset(seed) is not."""
    (tmp_path / "luck.py").write_text("""class Luck:
    actions = ("Up",)
    def reset(self, seed, **more):
        return f"{seed} {more}", {}
    def step(self, action):
        return "", 0.0, True, False, {}

class Plain(Luck):
    def reset(self, seed):
        return f"{seed}", {}
""")
    obs, _ = make_env(f"{tmp_path}/luck.py:Luck").reset(3, options={"noise_seed": 5})
    assert obs == "3 {'options': {'noise_seed': 5}}"
    assert make_env(f"{tmp_path}/luck.py:Plain").reset(3, options={"noise_seed": 5})[0] == "3"
