"""The games: what the agent sees, what it may do, what it is paid; and the text between them and the model.

A level is a function of `seed` alone; luck (slips, payouts) comes from a second stream, `noise_seed`. Grids are
text, one character a cell. Prompts are built from the live environment, so legend, names and limits are true.

RAGEN seeds level and luck alike: the members of a group share their luck, and group statistics measure the seed.
Here they share the level only. It takes the legend from defaults (wrong for its new vocabulary), hides the limit
of actions a turn, and runs what is left of a reply without its unknown actions; here a reply counts as a whole or
does nothing. Its Sokoban levels come from a search that knows no optimum, retried under a hash that differs
between processes; here reverse play gives the shortest plan of every state: levels and solver from one table.

In reading order: stream, known; Env (protocol, action budget, demonstrations); Bandit; Sokoban; FrozenLake;
UserEnv; make_env (names, variants); first_prompt, next_prompt; reply_end, parse_response; random_success; play.

Run alone: `python envs.py --env sokoban --seed 3` lets you play.
"""

import argparse
import inspect
import random
import runpy
import sys
from functools import lru_cache
from typing import NamedTuple, get_type_hints

LEVEL, NOISE, PLAY = 0, 1, 2      # kinds of random streams
# Careful and vague thoughts open with the same words: a low temperature alone shall not choose between the kinds.
OPENERS = ("Now", "So", "Here", "Well", "Look", "Okay")
HUNCHES = ("I will try.", "maybe this works.", "I move and see.", "it is a guess.", "one more try.", "this may be good.")


def stream(seed: int, kind: int) -> random.Random:
    """A private random stream; two kinds never coincide, whatever their seeds.

    >>> stream(3, LEVEL).random() == stream(3, LEVEL).random(), stream(3, LEVEL).random() == stream(3, NOISE).random()
    (True, False)
    """
    if int(seed) != seed or seed < 0:
        raise ValueError(f"seed={seed!r}: expected an integer of 0 or more")
    return random.Random(3 * int(seed) + kind)


def known(action: str, actions: tuple) -> str | None:
    """The canonical spelling of an action (case and outer blanks ignored), None if unknown. () knows any text.

    >>> known(" up ", ("Up", "Down")), known("fly", ("Up", "Down")), known(" hi ", ())
    ('Up', None, 'hi')
    """
    text = action.strip()
    return next((name for name in actions or (text,) if name and name.strip().casefold() == text.casefold()), None)


def spot(cell: int, cols: int) -> str:
    """Row and column of a cell, from 0: spot(7, 6) is '1 1'."""
    return f"{cell // cols} {cell % cols}"


def way(start: int, end: int, cols: int) -> str:
    """How to get from one cell to another: way(7, 18, 6) is 'Down 2 Left 1'."""
    down, right = end // cols - start // cols, end % cols - start % cols
    steps = (("Down", down), ("Up", -down), ("Right", right), ("Left", -right))
    return " ".join(f"{name} {count}" for name, count in steps if count > 0) or "0"


class Env:
    """The protocol, and the action budget. Annotated attributes are the settings that overrides may change.

    FORK: a new game sets rules and actions and writes start, act and render; solve and reason make it teachable.
    """
    max_turns: int = 5
    max_actions_per_turn: int = 5
    max_actions: int = 10           # in the whole episode
    bounds = {"max_turns": (1, 10**6), "max_actions_per_turn": (1, 10**6), "max_actions": (1, 10**6)}
    actions = ()                    # () takes free text
    instruction = ""                # after reset: rules, legend, action names, limits
    success = False
    rules = symbols = ""
    meanings = ()                   # of the symbols, in their order
    vague = ("I am not sure.",)     # thoughts that do not help, and how many actions follow them at most
    vague_actions = 3

    def __init__(self, **overrides):
        allowed = get_type_hints(type(self))
        for name, value in overrides.items():
            if name not in allowed:
                raise ValueError(f"{type(self).__name__} has no setting {name!r}; it has {', '.join(allowed)}")
            kind, (low, high) = allowed[name], self.bounds.get(name, (None, None))
            if not isinstance(value, {float: (int, float), tuple: (list, tuple)}.get(kind, kind)):
                raise ValueError(f"{name}={value!r}: expected {kind.__name__}")
            if low is not None and not low <= value <= high:
                raise ValueError(f"{name}={value!r}: expected {low} to {high}")
            setattr(self, name, kind(value))
        if not len(set(self.symbols)) == len(self.symbols) == len(self.meanings):
            raise ValueError(f"symbols={self.symbols!r}: expected {len(self.meanings)} different characters")

    def reset(self, seed: int, options: dict | None = None) -> tuple[str, dict]:
        """Start level `seed` -> (obs, info). options={"noise_seed": n} draws the luck, by default from `seed` too."""
        self.options = {"noise_seed": seed, **(options or {})}
        self.luck = stream(self.options["noise_seed"], NOISE)
        self.actions_left, self.info = self.max_actions, {}
        self.terminated = self.truncated = self.success = False
        self.start(seed)
        self.instruction = self.describe()
        return self.render(), dict(self.info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One action -> (obs, reward, terminated, truncated, info); info["valid"]: it was known, and taken.

        The step that uses the last action returns truncated=True unless it terminated. An unknown action and steps
        after the end change nothing, cost nothing and pay 0.
        """
        name, reward = known(action, self.actions), 0.0
        taken = name is not None and not (self.terminated or self.truncated)
        if taken:
            self.actions_left -= 1
            reward, self.terminated = self.act(name)
            self.truncated = not self.terminated and (self.truncated or self.actions_left == 0)
        info = {**self.info, "valid": taken, "success": self.success}
        return self.render(), float(reward), self.terminated, self.truncated, info

    def start(self, seed: int) -> None:
        """Build level `seed`, from stream(seed, LEVEL) alone."""

    def act(self, action: str) -> tuple[float, bool]:
        """Apply a known action -> (reward, terminated). Draws its luck from self.luck, sets self.success."""

    def render(self) -> str:
        """The state as text."""

    def solve(self) -> list[str] | None:
        """The best plan from here, None if there is none or none is known."""

    def optimal_success(self) -> float | None:
        """Right after reset: no policy succeeds more often than this; None if unknown."""
        return 1.0 if self.solve() else None

    def describe(self) -> str:
        """Rules, legend, action names and limits, from the live environment."""
        legend = ", ".join(f"{symbol} {meaning}" for symbol, meaning in zip(self.symbols, self.meanings))
        limits = (f"Actions: {', '.join(self.actions)}.\n" * bool(self.actions) + f"Limits: turns {self.max_turns}, "
                  f"actions per turn {self.max_actions_per_turn}, actions in all {self.max_actions}.")
        return "\n".join(filter(None, (self.rules, f"Legend: {legend}." * bool(legend), limits)))

    def demonstrate(self, rng: random.Random, careful: bool, think: bool = True) -> str:
        """A reply to the current state, to learn from: what follows the prefilled tag, up to </answer>.

        careful: the thought states facts and a plan, and the solver's actions follow; else both are vague and random.
        """
        limit = min(self.max_actions_per_turn, self.actions_left)
        thought, actions = f"{rng.choice(self.vague or ('',))} {rng.choice(HUNCHES)}", None
        if careful or not self.vague:
            thought, actions = self.reason(rng, limit)
        if not actions:
            count = rng.randint(1, max(1, min(limit, self.vague_actions)))
            actions = [rng.choice(self.actions or ("hello",)) for _ in range(count)]
        answer = f"{' || '.join(actions)}</answer>"
        return f"{rng.choice(OPENERS)} {thought}</think><answer>{answer}" if think else answer

    def reason(self, rng: random.Random, limit: int) -> tuple[str, list[str] | None]:
        """A careful thought, and the actions that follow from it (at most `limit`; None: random ones)."""
        plan = self.solve()
        return f"I do {', '.join(plan)}." if plan else "I see no way.", plan and plan[:limit]


class Bandit(Env):
    """Two arms, one pull. The low arm always pays low_reward; the high arm high_reward with probability high_prob.

    success: the arm with the higher mean was pulled, whatever it paid. The order of presentation is part of the level.
    """
    max_turns = max_actions_per_turn = max_actions = 1
    arms: tuple = ("Phoenix", "Dragon")        # (low, high)
    low_reward: float = 0.15                   # RAGEN: its code pays 0.1, the paper says 0.15. 0.35 is the control
    high_reward: float = 1.0
    high_prob: float = 0.25
    bounds = {**Env.bounds, "high_prob": (0, 1)}
    rules = ("You see two arms. Each arm pays in its own way, and its name may hint at how. "
             "Pull the arm that pays more on average.")
    vague = ()                                 # every thought names an arm, and the answer follows it

    def __init__(self, **overrides):
        super().__init__(**overrides)
        self.actions = self.arms
        if len(self.arms) != 2 or known(self.arms[0], self.arms[1:]):
            raise ValueError(f"arms={self.arms!r}: expected two different names, (low, high)")
        self.means = dict(zip(self.arms, (self.low_reward, self.high_reward * self.high_prob)))

    def start(self, seed: int) -> None:
        self.actions = self.arms if stream(seed, LEVEL).random() < 0.5 else self.arms[::-1]

    def render(self) -> str:
        return "\n".join(self.actions)

    def act(self, action: str) -> tuple[float, bool]:
        won = self.luck.random() < self.high_prob
        self.success = self.means[action] == max(self.means.values())
        return self.high_reward * won if action == self.arms[1] else self.low_reward, True

    def solve(self) -> list[str] | None:
        return [max(self.actions, key=self.means.get)]

    def reason(self, rng: random.Random, limit: int) -> tuple[str, list[str]]:
        arm, other = rng.sample(self.actions, 2)       # careful or not: which one pays is for RL to find out
        return rng.choice((f"{arm} may pay more.", f"I think {arm} is good.", f"{arm} sounds better than {other}.",
                           f"I will try {arm}.", f"my guess is {arm}.", f"I like {arm} more than {other}.",
                           f"{other} sounds bad, I take {arm}.", f"it is a guess: {arm}.")), [arm]


# A Sokoban state is one integer: above the 8 bits of the player's cell, one bit a box. Cells count row by row.

def carve(rng: random.Random, rows: int, cols: int) -> frozenset[int]:
    """Floor cells inside the border: a random walk that stamps small shapes, so that the floor is in one piece."""
    inside = {row * cols + col for row in range(1, rows - 1) for col in range(1, cols - 1)}
    stamps = ((-1, 0, 1), (-cols, 0, cols), (0, 1, cols), (0, 1, cols, cols + 1), (-1, 0, cols))
    cell, step, floor = rng.choice(sorted(inside)), 0, set()
    for _ in range(int(1.7 * (rows + cols))):
        while rng.random() < 0.35 or step == 0 or cell + step not in inside:
            step = rng.choice((-cols, cols, -1, 1))
        cell += step
        floor.update([cell + offset for offset in rng.choice(stamps)])
    return frozenset(floor & inside)


def plan_lengths(floor: frozenset, targets: int, cols: int, longest: int | None = None) -> dict[int, int]:
    """{state: moves of its shortest plan} by reverse play: un-walk and pull from all solved states, breadth first.

    >>> lengths = plan_lengths(frozenset({6, 7, 8}), 1 << 8, 5)        # a corridor: the box at 7 is pushed on to 8
    >>> lengths[1 << 8 << 8 | 7], lengths[1 << 7 << 8 | 6], len(lengths)
    (0, 1, 3)
    """
    layer = [targets << 8 | cell for cell in sorted(floor) if not targets >> cell & 1]
    lengths, length = dict.fromkeys(layer, 0), 0
    while layer and length != longest:
        length, last, layer = length + 1, layer, []
        for state in last:
            player, boxes = state & 255, state >> 8
            for step in (-cols, cols, -1, 1):
                back, ahead = player - step, player + step
                if back in floor and not boxes >> back & 1:
                    earlier = [boxes << 8 | back]
                    if boxes >> ahead & 1:          # the box ahead may have been pushed there from the player's cell
                        earlier.append((boxes ^ 1 << ahead ^ 1 << player) << 8 | back)
                    new = [before for before in earlier if before not in lengths]
                    lengths.update(dict.fromkeys(new, length))
                    layer += new
    return lengths


@lru_cache(maxsize=32)       # the members of a group share the level
def sokoban_level(seed: int, rows: int, cols: int, boxes: int, longest: int) -> tuple:
    """(floor, targets, state, plan lengths) of a level whose shortest plan has 1 to `longest` moves."""
    rng = stream(seed, LEVEL)
    for _ in range(1000):
        floor = sorted(carve(rng, rows, cols))
        targets = sum(1 << cell for cell in rng.sample(floor, min(boxes, len(floor))))
        lengths = plan_lengths(frozenset(floor), targets, cols, longest)
        starts = [state for state in lengths if not targets & (state >> 8 | 1 << (state & 255))]
        if starts:
            # The smaller of two draws: short plans may be met by luck, long ones are there to be learnt.
            wanted = min(rng.randint(1, longest), rng.randint(1, longest))
            miss = min(abs(lengths[state] - wanted) for state in starts)
            state = rng.choice([state for state in starts if abs(lengths[state] - wanted) == miss])
            return frozenset(floor), targets, state, lengths
    raise ValueError(f"found no {rows}x{cols} level with {boxes} box(es) and a plan of at most {longest} moves")


class Sokoban(Env):
    """Push every box onto a target. A step pays -0.1, +1 or -1 when the number of boxes on targets rises or falls,
    and +10 when all are on targets; so the winning push of a one-box level pays 10.9."""
    rows: int = 6
    cols: int = 6
    boxes: int = 1
    max_plan: int = 10              # no level needs more moves than this, nor than max_actions
    symbols: str = "#_O√XPS"
    meanings = ("wall", "floor", "target", "box on target", "box", "player", "player on target")
    bounds = {**Env.bounds, "rows": (4, 16), "cols": (4, 16), "boxes": (1, 8), "max_plan": (1, 100)}
    actions = ("Up", "Down", "Left", "Right")
    rules = ("You are the player. Push every box onto a target. Walk into a box to push it one cell, if the cell "
             "behind it is free. You cannot pull, and walls do not move.")
    vague = ("a box is not on its target yet.", "I want the box on the target.", "I have to push.", "I am not sure.")

    def start(self, seed: int) -> None:
        size = (self.rows, self.cols, self.boxes, min(self.max_plan, self.max_actions))
        self.floor, self.targets, self.state, self.lengths = sokoban_level(seed, *size)
        self.searched_all = False

    def render(self) -> str:
        wall, floor, target, box_on, box, player, player_on = self.symbols
        cells = [wall] * (self.rows * self.cols)
        for cell in self.floor:
            plain, on = (box, box_on) if self.state >> 8 + cell & 1 else (floor, target)
            plain, on = (player, player_on) if cell == self.state & 255 else (plain, on)
            cells[cell] = on if self.targets >> cell & 1 else plain
        return "\n".join("".join(cells[row:row + self.cols]) for row in range(0, len(cells), self.cols))

    def after(self, state: int, action: str) -> int:
        """The state that an action leads to, the same one if the way is blocked."""
        step = (-self.cols, self.cols, -1, 1)[self.actions.index(action)]
        boxes, cell = state >> 8, (state & 255) + step
        if boxes >> cell & 1:
            if cell + step not in self.floor or boxes >> cell + step & 1:
                return state
            boxes ^= 1 << cell ^ 1 << cell + step
        return boxes << 8 | cell if cell in self.floor else state

    def act(self, action: str) -> tuple[float, bool]:
        before = (self.state >> 8 & self.targets).bit_count()
        self.state = self.after(self.state, action)
        now = (self.state >> 8 & self.targets).bit_count()
        self.success = now == self.boxes
        return -0.1 + (now > before) - (now < before) + 10 * self.success, self.success

    def solve(self) -> list[str] | None:
        """A shortest plan ([] if solved), even where too few actions are left for it; None if the game is lost."""
        if self.state not in self.lengths and not self.searched_all:     # lost, or further away than any start
            self.lengths, self.searched_all = plan_lengths(self.floor, self.targets, self.cols), True
        state, plan = self.state, []
        for left in range(self.lengths.get(state, 0), 0, -1):
            plan.append(next(a for a in self.actions if self.lengths.get(self.after(state, a)) == left - 1))
            state = self.after(state, plan[-1])
        return plan if state in self.lengths else None

    def reason(self, rng: random.Random, limit: int) -> tuple[str, list[str] | None]:
        plan, state, pushes = self.solve(), self.state, []
        if not plan:
            return rng.choice(("a box is stuck, I can not win.", "a box can not go to its target.")), None
        for action in plan:
            after = self.after(state, action)
            if after >> 8 != state >> 8:        # the player goes to where the box was
                pushes.append((action, state & 255, after & 255))
            state = after
        _, stand, box = pushes[0]
        goal = box
        for _, player, cell in pushes:          # with several boxes: the first one pushed, and where it ends up
            goal = 2 * cell - player if cell == goal else goal
        me, at, target, stand = (spot(cell, self.cols) for cell in (self.state & 255, box, goal, stand))
        facts = rng.sample((f"I am at {me}", f"the box is at {at}", f"the target is at {target}"), 3)
        steps = " ".join(push[0] for push in pushes)
        return (f"{', '.join(facts)}. {rng.choice(('It must go', 'It has to go'))} {way(box, goal, self.cols)}. " +
                rng.choice((f"From {stand} I push {steps}.", f"I push {steps} from {stand}.",
                            f"I go to {stand} and push {steps}.", f"First to {stand}, then {steps}."))), plan[:limit]


def lake_transitions(lake: tuple[str, ...], slip: float = 1 / 3) -> list[list[list[tuple]]]:
    """Gymnasium's table for a map of S, F, H, G: table[state][action] = [(probability, next, reward, done), ...].

    An action goes to its one side, straight on, or to its other side; never backwards. The border holds you.

    >>> lake_transitions(("SF", "HG"), slip=0.25)[1][1]
    [(0.25, 0, 0.0, False), (0.5, 3, 1.0, True), (0.25, 1, 0.0, False)]
    """
    rows, cols, letters = len(lake), len(lake[0]), "".join(lake)

    def outcome(chance, cell, direction):
        down, right = ((0, -1), (1, 0), (0, 1), (-1, 0))[direction % 4]        # Left, Down, Right, Up
        row, col = min(max(cell // cols + down, 0), rows - 1), min(max(cell % cols + right, 0), cols - 1)
        letter = lake[row][col]
        return chance, row * cols + col, float(letter == "G"), letter in "GH"

    return [[[(1.0, cell, 0.0, True)] if letter in "GH" else
             [outcome(slip, cell, action - 1), outcome(1 - 2 * slip, cell, action), outcome(slip, cell, action + 1)]
             for action in range(4)] for cell, letter in enumerate(letters)]


@lru_cache(maxsize=256)
def lake_values(lake: tuple[str, ...], slip: float, horizon: int) -> list[list[tuple[float, int]]]:
    """values[n][state] = (chance to reach the goal within n actions, best action), by backward induction."""
    table = lake_transitions(lake, slip)
    values = [[(0.0, 0)] * len(table)]
    for _ in range(horizon):
        chances = [[sum(p * (reward if done else values[-1][cell][0]) for p, cell, reward, done in outcomes)
                    for outcomes in actions] for actions in table]
        values.append([(max(row), row.index(max(row))) for row in chances])
    return values


class FrozenLake(Env):
    """Cross the ice to the goal, which pays 1; a hole ends the game. A move slips to each side with chance `slip`."""
    size: int = 4
    frozen: float = 0.8             # chance that a cell is ice
    slip: float = 1 / 3
    symbols: str = "_OGPX√"
    meanings = ("ice", "hole", "goal", "player", "player in hole", "player on goal")
    bounds = {**Env.bounds, "size": (2, 16), "frozen": (0, 1), "slip": (0, 0.5)}
    actions = ("Left", "Down", "Right", "Up")
    vague = ("I am not at the goal yet.", "I want to go to the goal.", "the ice may slip.", "I am not sure.")
    vague_actions = 2

    def start(self, seed: int) -> None:
        rng, n, reached = stream(seed, LEVEL), self.size, []
        while not reached or self.goal not in reached:           # until there is a path around the holes
            letters = ["F" if rng.random() < self.frozen else "H" for _ in range(n * n)]
            self.cell, self.goal = rng.sample(range(n * n), 2)
            letters[self.cell], letters[self.goal] = "S", "G"
            self.lake = tuple("".join(letters[row:row + n]) for row in range(0, n * n, n))
            self.table, reached = lake_transitions(self.lake, self.slip), [self.cell]
            for cell in reached:
                reached += {near for move in self.table[cell] for _, near, _, _ in move}.difference(reached)
        self.rules = ("You are the player. Walk over the ice to the goal and avoid the holes. The ice is slippery: a "
                      f"move slips to its left or right side with chance {self.slip:.2f} each, never backwards.")

    def render(self) -> str:
        ice, hole, goal, player, drowned, home = self.symbols
        cells = [{"H": hole, "G": goal}.get(letter, ice) for letter in "".join(self.lake)]
        cells[self.cell] = {ice: player, hole: drowned, goal: home}[cells[self.cell]]
        return "\n".join("".join(cells[row:row + self.size]) for row in range(0, len(cells), self.size))

    def act(self, action: str) -> tuple[float, bool]:
        outcomes = self.table[self.cell][self.actions.index(action)]
        (_, self.cell, reward, done), = self.luck.choices(outcomes, [outcome[0] for outcome in outcomes])
        self.success = reward > 0
        return reward, done

    def best(self, cell: int, actions_left: int) -> tuple[float, int]:
        """(chance of success, best action) in a cell."""
        return lake_values(self.lake, self.slip, self.max_actions)[actions_left][cell]

    def solve(self) -> list[str] | None:
        """The best next action for the actions left, a list of one; None after the end."""
        over = self.terminated or self.truncated
        return None if over else [self.actions[self.best(self.cell, self.actions_left)[1]]]

    def optimal_success(self) -> float:
        return self.best(self.cell, self.actions_left)[0]

    def reason(self, rng: random.Random, limit: int) -> tuple[str, list[str]]:
        cell, plan, letters = self.cell, [], "".join(self.lake)
        for left in range(self.actions_left, self.actions_left - min(limit, 2), -1):
            move = self.best(cell, left)[1]
            cell = self.table[cell][move][len(self.table[cell][move]) // 2][1]       # as if the step did not slip
            plan.append(self.actions[move])
        around = sorted({near for move in self.table[self.cell] for _, near, _, _ in move})
        me, goal, *holes = (spot(cell, self.size) for cell in
                            [self.cell, self.goal] + [near for near in around if letters[near] == "H"])
        facts = rng.sample((f"I am at {me}", f"the goal is at {goal}", "no hole is next to me" if not holes else
                            f"next to me a hole is at {' and '.join(holes)}"), 3)
        steps, to_goal = " then ".join(plan), way(self.cell, self.goal, self.size)
        return (f"{', '.join(facts)}. {rng.choice(('I have to go', 'To the goal it is'))} {to_goal}. " +
                rng.choice((f"I go {steps}.", f"Best is {steps}.", f"I take {steps}.", f"First {steps}."))), plan


class UserEnv(Env):
    """A user's class behind the same protocol, budget included. It needs Gymnasium's reset(seed, options) -> (obs,
    info) and step(action) -> (obs, reward, terminated, truncated, info), obs being text; all else is optional.

    reset(seed) will do where there is no luck. success defaults to "the rewards sum to more than 0".
    """

    def __init__(self, cls: type, **overrides):
        limits = {name: overrides.pop(name) for name in Env.bounds if name in overrides}
        try:
            self.inner = cls(**overrides)
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from error
        super().__init__(**{name: getattr(self.inner, name, getattr(Env, name)) for name in Env.bounds} | limits)
        for name in Env.bounds:
            setattr(self.inner, name, getattr(self, name))
        for name in ("solve", "optimal_success", "demonstrate"):
            setattr(self, name, getattr(self.inner, name, getattr(self, name)))

    def receive(self, result: tuple, form: str) -> tuple:
        """Check what the user's reset or step returned, and keep what a turn may change."""
        if not isinstance(result, tuple) or len(result) != form.count(",") + 1 or not isinstance(result[0], str):
            raise ValueError(f"{type(self.inner).__name__}.{form} expected, obs a str, got {result!r}"[:300])
        self.obs, self.info = result[0], dict(result[-1] or {})
        self.actions, self.rules = tuple(getattr(self.inner, "actions", ())), getattr(self.inner, "instruction", "")
        return result

    def start(self, seed: int) -> None:
        self.total, reset = 0.0, self.inner.reset
        with_luck = "options" in inspect.signature(reset).parameters
        self.receive(reset(seed=seed, options=self.options) if with_luck else reset(seed), "reset -> (obs, info)")

    def render(self) -> str:
        return self.obs

    def act(self, action: str) -> tuple[float, bool]:
        _, reward, terminated, self.truncated, _ = self.receive(
            self.inner.step(action), "step -> (obs, reward, terminated, truncated, info)")
        self.total += reward
        self.success = bool(getattr(self.inner, "success", self.total > 0))
        return reward, bool(terminated)


ENVS = {        # name: (class, settings)
    "bandit": (Bandit, {}),
    "bandit-test": (Bandit, {"arms": ("Librarian", "Trader")}),
    "bandit-rev": (Bandit, {"arms": ("Trader", "Librarian")}),     # RAGEN: the paper's naming; its scripts swap the two
    "frozenlake": (FrozenLake, {}),
    "sokoban": (Sokoban, {}),
    "sokoban-large": (Sokoban, {"rows": 8, "cols": 8, "boxes": 2}),
    "sokoban-newvocab": (Sokoban, {"symbols": "W.GCBA@"}),
}


def make_env(name: str, **overrides) -> Env:
    """An environment by name, settings overridden; "path/to/file.py:Class" loads a user's own.

    >>> make_env("sokoban", max_actions=7).max_actions
    7
    >>> make_env("chess")    # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: unknown environment 'chess'; known: bandit, bandit-test, ... or path/to/file.py:Class
    """
    if name in ENVS:
        cls, settings = ENVS[name]
        return cls(**settings | overrides)
    path, _, class_name = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(ENVS)}, or path/to/file.py:Class")
    try:
        cls = runpy.run_path(path).get(class_name)
    except Exception as error:       # whatever the user's file raises, the flag is what to look at first
        raise ValueError(f"environment {name!r}: the file does not load: {error!r}") from error
    for method in ("reset", "step"):
        if not isinstance(cls, type) or not callable(getattr(cls, method, None)):
            raise ValueError(f"environment {name!r}: expected a class {class_name} with a method {method}")
    return UserEnv(cls, **overrides)


def first_prompt(env: Env, obs: str, think: bool = True) -> str:
    """The first user message: the instruction, the form of a reply, turn header, state."""
    answer = "action || action" if env.max_actions_per_turn > 1 else "action"
    form = f"{'<think>your thoughts</think>' * think}<answer>{answer if env.actions else 'your text'}</answer>"
    return f"{env.instruction}\nReply as {form}\n{header(env, 1, env.max_actions)}\n{obs}"


def next_prompt(env: Env, obs: str, reward: float, valid: bool, turn: int, actions_left: int) -> str:
    """The user message that opens turn `turn` (2, 3, ...), after a turn that paid `reward`."""
    note = "" if valid else " No valid action, so nothing happened."
    return f"Reward {round(reward, 2) + 0.0:.2f}.{note}\n{header(env, turn, actions_left)}\n{obs}"


def header(env: Env, turn: int, actions_left: int) -> str:
    """'Turn 2 of 5, 7 actions left.'"""
    return f"Turn {turn} of {env.max_turns}, {actions_left} action{'s' * (actions_left != 1)} left."


def opening_tag(think: bool) -> str:
    """What is prefilled behind the generation prompt."""
    return "<think>" if think else "<answer>"


class Parsed(NamedTuple):
    """What a reply asks for; `surplus` counts the actions cut beyond the limit of a turn."""
    actions: list[str]
    valid: bool
    thought: str
    surplus: int = 0


def reply_end(text: str, think: bool = True) -> int | None:
    """Where a reply stops: behind the first </answer> after </think> (without thinking: the first); None before.

    >>> reply_end("<think>no <answer>Up</answer></think><answer>Left</answer> and so on")
    58
    """
    start = text.find("</think>") if think else 0
    end = text.find("</answer>", start) if start >= 0 else -1
    return end + len("</answer>") if end >= 0 else None


def parse_response(text: str, actions: tuple, max_actions: int, think: bool = True) -> Parsed:
    """Read prefilled tag + reply. Never raises: a reply is valid as a whole, or it does nothing.

    The first answer behind the first </think> counts; what stands inside the thought or around the answer does not.
    Its pieces between || are stripped and empty ones dropped; then every name must be known; then those beyond
    max_actions are cut. Tags count as written, in lower case. actions=() takes any text but blanks, as one action.

    >>> parse_response("<think>go</think><answer>up || LEFT</answer>", ("Up", "Left"), 5)
    Parsed(actions=['Up', 'Left'], valid=True, thought='go', surplus=0)
    >>> parse_response("<answer>Up || Fly</answer>", ("Up", "Left"), 5, think=False)
    Parsed(actions=[], valid=False, thought='', surplus=0)
    """
    thought = text.partition("</think>")[0].removeprefix("<think>").strip() if think else ""
    reply = text[text.find("</think>") if think else 0:reply_end(text, think) or 0]
    answer = reply.removesuffix("</answer>").partition("<answer>")[2]
    names = [known(piece, actions) for piece in (answer.split("||") if actions else [answer]) if piece.strip()]
    if not names or None in names:
        return Parsed([], False, thought)
    return Parsed(names[:max_actions], True, thought, max(len(names) - max_actions, 0))


def random_success(env: Env, seed: int, draws: int = 16) -> float | None:
    """Share of successes of uniform valid actions over the whole budget on level `seed`; None for free text."""
    wins = 0
    for number in range(seed * draws, (seed + 1) * draws):
        env.reset(seed, {"noise_seed": number})
        rng = stream(number, PLAY)
        while env.actions and not (env.terminated or env.truncated):
            env.step(rng.choice(env.actions))
        wins += env.success
    return wins / draws if env.actions else None


def play(env: Env, seed: int) -> None:
    """Play one level in the terminal."""
    obs, _ = env.reset(seed)
    print(f"{env.instruction}\nOne action or several (A || B), h shows the solver's plan, q quits.\n\n{obs}")
    while not (env.terminated or env.truncated):
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "q":
            return
        parsed = parse_response(f"<answer>{line}</answer>", env.actions, env.max_actions_per_turn, think=False)
        for action in parsed.actions:
            obs, reward, _, _, info = env.step(action)
            print(f"{action}: reward {reward:.2f}, {env.actions_left} left\n{obs}" if info["valid"] else "")
        if not parsed.valid:
            print(f"plan: {env.solve()}" if line.strip() == "h" else "no such action")
    print("solved" if env.success else "over")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Play a game in the terminal.")
    parser.add_argument("--env", default="sokoban", help=f"{', '.join(ENVS)} or path/to/file.py:Class")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    try:
        play(make_env(flags.env), flags.seed)
    except ValueError as error:
        parser.error(str(error))
