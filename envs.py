"""The games: what the agent sees, may do and is paid; and the text between a game and the model.

A level is a function of `seed` alone; luck (slips, payouts) comes from a second stream, `noise_seed`. Grids
are text, one character a cell. Prompts are made from the live game, so legend, names and limits are true.

RAGEN seeds level and luck alike: the members of a group share their luck, and group statistics measure a
seed; here they share the level only. Its legend comes from defaults (wrong for its new vocabulary), it hides
the limit of actions per turn, and runs a reply without its unknown actions; here a reply counts as a whole or
does nothing. Its Sokoban levels come from a search that knows no optimum, retried under a hash that changes
with the process; here reverse play finds the shortest plan of every state, for levels and solver alike.

In reading order: stream, known, say; Env (protocol, action budget, demonstrations), Bandit, Sokoban,
FrozenLake, UserEnv; make_env; first_prompt, next_prompt; reply_end, parse_response; random_success; play.
Run alone: `python envs.py --env sokoban --seed 3` lets you play.
"""
import argparse
import inspect
import random
import runpy
import sys
from collections import namedtuple
from functools import lru_cache, partial

LEVEL, NOISE, PLAY = 0, 1, 2      # kinds of random streams
# Careful and vague thoughts open alike: a low temperature alone shall not choose between the two kinds.
OPENERS = "Now | So | Here | Well | Look | Okay\n"
HUNCHES = "\nI will try. | maybe this works. | I move and see. | it is a guess. | this may be good."


def stream(seed: int, kind: int) -> random.Random:
    """A private random stream for a seed of 0 or more; two kinds never coincide, whatever their seeds."""
    return random.Random(3 * int(seed) + kind)


def known(action: str, actions: tuple) -> str | None:
    """The canonical spelling of an action, case and outer blanks ignored; None if unknown. () knows any text.

    >>> known(" up ", ("Up", "Down")), known("fly", ("Up", "Down")), known(" hi ", ())
    ('Up', None, 'hi')
    """
    text = action.strip()
    return next((name for name in actions or [text] if text and name.strip().lower() == text.lower()), None)


def say(rng: random.Random, book: str, **facts) -> str:
    """A thought: one alternative (parted by |) of each line of a phrase book, after an opening word.

    >>> say(random.Random(0), "the box is | the box stands\\nat {at}.", at="1 2")
    'Well the box stands at 1 2.'
    """
    return " ".join(rng.choice(line.split(" | ")) for line in (OPENERS + book).splitlines()).format(**facts)


def spot(cell: int, cols: int) -> str:
    """Row and column of a cell, from 0: spot(7, 6) is '1 1'."""
    return f"{cell // cols} {cell % cols}"


def way(start: int, end: int, cols: int) -> str:
    """How to get from one cell to another: way(7, 18, 6) is 'Down 2 Left 1'."""
    down, right = end // cols - start // cols, end % cols - start % cols
    steps = (("Down", down), ("Up", -down), ("Right", right), ("Left", -right))
    return " ".join(f"{name} {count}" for name, count in steps if count > 0) or "0"


class Env:
    """The protocol, and the action budget.

    FORK: a new game has `actions` (none: free text), `rules`, for a grid `symbols` and `meanings`, and writes
    start(seed): build the level from stream(seed, LEVEL); act(action) -> (reward, terminated): take luck from
    self.luck, set self.success; render() -> the state as text; solve and reason, to be taught from.
    """
    max_turns, max_actions_per_turn, max_actions = 5, 5, 10
    room = property(lambda self: min(self.max_actions, self.max_turns * self.max_actions_per_turn))  # in all
    settings = dict.fromkeys(("max_turns", "max_actions_per_turn", "max_actions"), (1, 10**6))  # and bounds
    actions, meanings, success = (), (), False
    symbols = rules = instruction = ""          # instruction: rules, legend, action names and limits
    vague, vague_actions = "I am not sure.", 3  # poor thoughts, and how many random actions follow at most

    def __init__(self, **overrides):
        for name, value in overrides.items():
            if name not in self.settings:
                raise ValueError(f"{type(self).__name__} has no {name!r}, only {', '.join(self.settings)}")
            kind, bounds = type(getattr(self, name)), self.settings[name]       # bounds "": any
            fits = isinstance(value, {float: (int, float), tuple: (list, tuple)}.get(kind, kind))
            if not fits or bounds and not bounds[0] <= value <= bounds[1]:
                raise ValueError(f"{name}={value!r}: expected {kind.__name__} {bounds and f'in {bounds}'}")
            setattr(self, name, kind(value))
        if not len(set(self.symbols)) == len(self.symbols) == len(self.meanings):
            raise ValueError(f"symbols={self.symbols!r}: expected {len(self.meanings)} different characters")

    def reset(self, seed: int, options: dict | None = None) -> tuple[str, dict]:
        """Start level `seed` -> (obs, info). options={"noise_seed": n} draws the luck (default: `seed`)."""
        self.options = {"noise_seed": seed} | (options or {})
        self.luck = stream(self.options["noise_seed"], NOISE)
        self.actions_left, self.info = self.max_actions, {}
        self.terminated = self.truncated = self.success = False
        self.start(int(seed))
        self.instruction = self.describe()
        return self.render(), dict(self.info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One action -> (obs, reward, terminated, truncated, info); info["valid"]: it was known, and taken.

        Using the last action truncates, unless it terminates. An unknown action, and a step after the end,
        changes nothing, costs nothing and pays 0.
        """
        name, reward = known(action, self.actions), 0.0
        taken = name is not None and not (self.terminated or self.truncated)
        if taken:
            self.actions_left -= 1
            reward, self.terminated = self.act(name)
            self.truncated = not self.terminated and (self.truncated or self.actions_left == 0)
        info = self.info | {"valid": taken, "success": self.success}
        return self.render(), float(reward), self.terminated, self.truncated, info

    def solve(self) -> list[str] | None:
        """The best plan from here, None if there is none or none is known."""

    def optimal_success(self) -> float | None:
        """Right after reset: no policy succeeds more often than this; None if unknown."""
        return float(len(plan) <= self.room) if (plan := self.solve()) else None

    def describe(self) -> str:
        """Rules, legend, action names and limits, from the live environment."""
        legend = ", ".join(f"{symbol} {meaning}" for symbol, meaning in zip(self.symbols, self.meanings))
        text = self.rules + f"\nLegend: {legend}." * bool(legend)
        limits = f"\nActions: {', '.join(self.actions)}." * bool(self.actions) + f"""
Limits: turns {self.max_turns}, actions per turn {self.max_actions_per_turn}, \
actions in all {self.max_actions}."""
        return text if text.endswith(limits) else text + limits

    def demonstrate(self, rng: random.Random, careful: bool, think: bool = True) -> str:
        """A reply to this state, to learn from: what follows the prefilled tag, up to </answer>. A careful
        thought states facts and a plan, and the solver's actions follow; else both are vague and random."""
        reasoned = careful or not self.vague
        thought, plan = self.reason(rng) if reasoned else (say(rng, self.vague + HUNCHES), None)
        guess = [rng.choice(self.actions or ("hello",)) for _ in range(rng.randint(1, self.vague_actions))]
        answer = " || ".join((plan or guess)[:min(self.max_actions_per_turn, self.actions_left)])
        return f"{thought}</think><answer>{answer}</answer>" if think else f"{answer}</answer>"

    def reason(self, rng: random.Random) -> tuple[str, list[str] | None]:
        """A careful thought and the actions that follow from it (None: random ones)."""
        return say(rng, HUNCHES.strip()), self.solve()


class Bandit(Env):
    """Two arms, one pull: the low arm pays low_reward, the high arm high_reward with chance high_prob, or 0.

    success: the arm with the higher mean was pulled, whatever it paid. Their order is part of the level.
    """
    max_turns = max_actions_per_turn = max_actions = 1
    arms = ("Phoenix", "Dragon")                # (low, high)
    low_reward, high_reward, high_prob = 0.15, 1.0, 0.25     # RAGEN: 0.1 in its code. 0.35 is the control
    settings = Env.settings | {"arms": "", "low_reward": "", "high_reward": "", "high_prob": (0, 1)}
    rules = """You see two arms. Each arm pays in its own way, and its name may hint at how. \
Pull the arm that pays more on average."""
    vague = ""                                  # every thought names an arm, and the answer follows it
    book = """{arm} may pay more. | I think {arm} is good. | {arm} sounds better than {other}. | \
I will try {arm}. | my guess is {arm}. | I like {arm} more. | {other} sounds bad, I take {arm}."""

    def __init__(self, **overrides):
        super().__init__(**overrides)
        self.actions = self.arms
        self.means = dict(zip(self.arms, (self.low_reward, self.high_reward * self.high_prob)))
        if not len(self.arms) == len({str(arm).strip().lower() for arm in self.arms} - {""}) == 2:
            raise ValueError(f"arms={self.arms!r}: expected two names, (low, high)")

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

    def reason(self, rng: random.Random) -> tuple[str, list[str]]:
        arm, other = rng.sample(self.actions, 2)       # careful or not: which one pays is for RL to find out
        return say(rng, self.book, arm=arm, other=other), [arm]


# A Sokoban state is one integer: 8 bits for the player's cell, above a bit a box. Cells count row by row.

def carve(rng: random.Random, size: int) -> frozenset[int]:
    """Floor cells inside the border: a random walk that stamps small shapes, so the floor is in one piece."""
    inside = {row * size + col for row in range(1, size - 1) for col in range(1, size - 1)}
    stamps = ((-1, 0, 1), (-size, 0, size), (0, 1, size), (0, 1, size, size + 1), (-1, 0, size))
    cell, step, floor = rng.choice(sorted(inside)), 0, set()
    for _ in range(3 * size):
        step = rng.choice((-size, size, -1, 1)) if step == 0 or rng.random() < 0.35 else step
        cell += step * (cell + step in inside)
        floor.update([cell + offset for offset in rng.choice(stamps)])
    return frozenset(floor & inside)


def plan_lengths(floor: frozenset, targets: int, size: int) -> dict[int, int]:
    """{state: moves of its shortest plan}, by reverse play: un-walk and pull, breadth first, from the end."""
    states = [targets << 8 | cell for cell in sorted(floor) if not targets >> cell & 1]
    lengths = dict.fromkeys(states, 0)
    for state in states:                                    # grows while we go, in the order of length
        player, boxes = state & 255, state >> 8
        for step in (-size, size, -1, 1):
            back, ahead = player - step, player + step
            if back in floor and not boxes >> back & 1:
                # The player may have walked here, or pushed the box ahead, if any, from this cell.
                pulled = boxes ^ (1 << ahead ^ 1 << player) * (boxes >> ahead & 1)
                for earlier in (boxes << 8 | back, pulled << 8 | back):
                    if earlier not in lengths:
                        lengths[earlier] = lengths[state] + 1
                        states.append(earlier)
    return lengths


@lru_cache(maxsize=32)       # the members of a group share the level
def sokoban_level(seed: int, size: int, boxes: int, longest: int) -> tuple:
    """(floor, targets, state, plan lengths) of a level whose shortest plan has 1 to `longest` moves."""
    rng = stream(seed, LEVEL)
    for _ in range(200):
        floor = carve(rng, size)
        targets = sum(1 << cell for cell in rng.sample(sorted(floor), min(boxes, len(floor))))
        lengths = plan_lengths(floor, targets, size)
        starts = [state for state, length in lengths.items()      # no box and no player on a target
                  if length <= longest and not targets & (state >> 8 | 1 << (state & 255))]
        if starts:
            # The smaller of two draws: short plans may be met by luck, long ones are there to be learnt.
            wanted = min(rng.randint(1, longest + 2), rng.randint(1, longest + 2))
            start = min(starts, key=lambda state: (abs(lengths[state] - wanted), rng.random()))
            return floor, targets, start, lengths
    raise ValueError(f"no level of size={size} with boxes={boxes} and a plan of at most {longest} moves")


class Sokoban(Env):
    """Push every box onto a target. A step pays -0.1, +1 / -1 if more / fewer boxes are on targets now, and
    +10 once all are: the winning push of a one-box level pays 10.9."""
    size, boxes, symbols = 6, 1, "#_O√XPS"
    meanings = ("wall", "floor", "target", "box on target", "box", "player", "player on target")
    settings = Env.settings | {"size": (5, 12), "boxes": (1, 3), "symbols": ""}
    actions = ("Up", "Down", "Left", "Right")
    rules = """You are the player. Push every box onto a target. Walk into a box to push it one cell, if the \
cell behind it is free. You cannot pull, and walls do not move."""
    vague = "a box is not on its target yet. | I want the box on the target. | I must push. | I am not sure."
    book = """I am at {me}, the box is at {box}, the target is at {goal}. | the box is at {box}, \
the target is at {goal}, I am at {me}. | the target is at {goal}, I am at {me}, the box is at {box}.
It must go {way}. | It has to go {way}.
From {stand} I push {steps}. | I push {steps} from {stand}. | I go to {stand} and push {steps}. | \
First to {stand}, then {steps}."""

    def start(self, seed: int) -> None:
        level = sokoban_level(seed, self.size, self.boxes, min(10, self.max_actions))
        self.floor, self.targets, self.state, self.lengths = level

    def render(self) -> str:
        cells = [self.symbols[0]] * self.size ** 2
        for cell in self.floor:
            kinds = (5, 6) if cell == self.state & 255 else (4, 3) if self.state >> 8 + cell & 1 else (1, 2)
            cells[cell] = self.symbols[kinds[self.targets >> cell & 1]]
        return "\n".join("".join(cells[row:row + self.size]) for row in range(0, len(cells), self.size))

    def after(self, state: int, action: str) -> int:
        """The state that an action leads to, the same one if the way is blocked."""
        step = (-self.size, self.size, -1, 1)[self.actions.index(action)]
        boxes, cell = state >> 8, (state & 255) + step
        ahead = cell + step * (boxes >> cell & 1)           # where a box in `cell` goes; `cell` without a box
        if ahead not in self.floor or ahead != cell and boxes >> ahead & 1:
            return state
        return (boxes ^ 1 << cell ^ 1 << ahead) << 8 | cell

    def act(self, action: str) -> tuple[float, bool]:
        before, self.state = self.state, self.after(self.state, action)
        was, now = ((state >> 8 & self.targets).bit_count() for state in (before, self.state))
        self.success = now == self.boxes
        return -0.1 + (now > was) - (now < was) + 10 * self.success, self.success

    def solve(self) -> list[str] | None:
        """A shortest plan ([] if solved), however few actions are left; None if the game is lost."""
        state, plan = self.state, []
        for left in range(self.lengths.get(state, 0), 0, -1):
            plan.append(next(a for a in self.actions if self.lengths.get(self.after(state, a)) == left - 1))
            state = self.after(state, plan[-1])
        return plan if state in self.lengths else None

    def reason(self, rng: random.Random) -> tuple[str, list[str] | None]:
        plan, state, pushes = self.solve(), self.state, []
        if not plan:
            return say(rng, "I can not win this. | a box can not go to its target."), None
        for action in plan:
            before, state = state, self.after(state, action)
            if before >> 8 != state >> 8:                   # the player goes to where the box was
                pushes.append((action, before & 255, state & 255))
        goal = box = pushes[0][2]
        for _, player, cell in pushes:          # where the box of the first push ends up, if one of several
            goal += (cell - player) * (cell == goal)
        cells = self.state & 255, box, goal, pushes[0][1]
        facts = dict(zip(("me", "box", "goal", "stand"), (spot(cell, self.size) for cell in cells)))
        steps = " ".join(push[0] for push in pushes)
        return say(rng, self.book, **facts, way=way(box, goal, self.size), steps=steps), plan


def lake_transitions(lake: tuple[str, ...], slip: float = 1 / 3) -> list[list[list[tuple]]]:
    """Gymnasium's table for a map of S, F, H, G: table[state][action] = [(chance, next, reward, done), ...].

    An action goes to its one side, straight on, or to its other side; never backwards. The border holds you.

    >>> lake_transitions(("SF", "HG"), slip=0.25)[1][1]
    [(0.25, 0, 0.0, False), (0.5, 3, 1.0, True), (0.25, 1, 0.0, False)]
    """
    rows, cols = len(lake), len(lake[0])

    def outcome(chance, row, col, direction):
        down, right = ((0, -1), (1, 0), (0, 1), (-1, 0))[direction % 4]        # Left, Down, Right, Up
        row, col = min(max(row + down, 0), rows - 1), min(max(col + right, 0), cols - 1)
        return chance, row * cols + col, float(lake[row][col] == "G"), lake[row][col] in "GH"

    return [[[(1.0, row * cols + col, 0.0, True)] if lake[row][col] in "GH" else
             [outcome(chance, row, col, action + turn)
              for chance, turn in ((slip, -1), (1 - 2 * slip, 0), (slip, 1))]
             for action in range(4)] for row in range(rows) for col in range(cols)]


@lru_cache(maxsize=256)
def lake_values(lake: tuple[str, ...], slip: float, horizon: int) -> tuple[list, list]:
    """(transitions, values); values[n][state] = (chance to reach the goal within n actions, best action)."""
    table = lake_transitions(lake, slip)
    values = [[(0.0, 0)] * len(table)]
    for _ in range(horizon):                                 # backward induction
        chances = [[sum(p * (reward if done else values[-1][cell][0]) for p, cell, reward, done in outcomes)
                    for outcomes in actions] for actions in table]
        values.append([(max(row), row.index(max(row))) for row in chances])
    return table, values


class FrozenLake(Env):
    """Cross the ice to the goal, which pays 1; a hole ends the game. A move slips to either side with chance
    `slip`; a cell is ice with chance `frozen`."""
    size, frozen, slip, symbols = 4, 0.8, 1 / 3, "_OGPX√"
    meanings = ("ice", "hole", "goal", "player", "player in hole", "player on goal")
    settings = Env.settings | {"size": (2, 16), "frozen": (0, 1), "slip": (0, 0.5), "symbols": ""}
    actions, vague_actions = ("Left", "Down", "Right", "Up"), 2
    vague = "I am not at the goal yet. | I want to go to the goal. | the ice may slip. | I am not sure."
    book = """I am at {me}, the goal is at {goal}, {holes}. | the goal is at {goal}, {holes}, \
I am at {me}. | {holes}, I am at {me}, the goal is at {goal}.
I have to go {way}. | To the goal it is {way}.
I go {steps}. | Best is {steps}. | I take {steps}. | First {steps}."""

    def start(self, seed: int) -> None:
        rng, n, chance = stream(seed, LEVEL), self.size, 0
        while not chance:           # until there is a path around the holes, short enough for the budget
            letters = ["F" if rng.random() < self.frozen else "H" for _ in range(n * n)]
            self.cell, self.goal = rng.sample(range(n * n), 2)
            letters[self.cell], letters[self.goal] = "S", "G"
            self.lake = tuple("".join(letters[row:row + n]) for row in range(0, n * n, n))
            self.table, self.values = lake_values(self.lake, self.slip, self.max_actions)
            chance = self.values[-1][self.cell][0]
        self.rules = f"""You are the player. Walk over the ice to the goal and avoid the holes. The ice is \
slippery: a move slips to its left or right side with chance {self.slip:.2f} each, never backwards."""

    def render(self) -> str:
        kinds = ["FHG".find(letter) for letter in "".join(self.lake).replace("S", "F")]
        cells = [self.symbols[kind + 3 * (cell == self.cell)] for cell, kind in enumerate(kinds)]
        return "\n".join("".join(cells[row:row + self.size]) for row in range(0, len(cells), self.size))

    def act(self, action: str) -> tuple[float, bool]:
        outcomes = self.table[self.cell][self.actions.index(action)]
        (_, self.cell, reward, done), = self.luck.choices(outcomes, [outcome[0] for outcome in outcomes])
        self.success = reward > 0
        return reward, done

    def solve(self) -> list[str] | None:
        """The best next action for the actions left, a list of one."""
        return [self.actions[self.values[self.actions_left][self.cell][1]]]

    def optimal_success(self) -> float:     # of one who sees every slip; who plans several actions has less
        return self.values[self.room][self.cell][0]

    def reason(self, rng: random.Random) -> tuple[str, list[str]]:
        cell, plan, letters = self.cell, [], "".join(self.lake)
        for left in range(self.actions_left, max(self.actions_left - 2, 0), -1):
            move = self.values[left][cell][1]
            cell = self.table[cell][move][len(self.table[cell][move]) // 2][1]     # if it does not slip
            plan.append(self.actions[move])
        near = {cell for move in self.table[self.cell] for _, cell, _, _ in move if letters[cell] == "H"}
        me, goal, *holes = (spot(cell, self.size) for cell in (self.cell, self.goal, *sorted(near)))
        holes = f"next to me a hole is at {' and '.join(holes)}" if holes else "no hole is next to me"
        return say(rng, self.book, me=me, goal=goal, holes=holes, way=way(self.cell, self.goal, self.size),
                   steps=" then ".join(plan)), plan


class UserEnv(Env):
    """A user's class behind the same protocol. It has Gymnasium's reset(seed, options) -> (obs, info),
    or reset(seed) without luck, and step(action) -> (obs, reward, terminated, truncated, info); obs is text.
    All else has defaults, the budget is kept here; success is: the rewards sum to more than 0."""

    def __init__(self, cls: type, **overrides):
        limits = {name: overrides.pop(name) for name in Env.settings if name in overrides}
        self.inner = cls(**overrides)
        super().__init__(**{x: getattr(self.inner, x, getattr(Env, x)) for x in Env.settings} | limits)
        for name in Env.settings:
            setattr(self.inner, name, getattr(self, name))
        for name in ("solve", "optimal_success", "demonstrate"):
            setattr(self, name, getattr(self.inner, name, getattr(self, name)))

    def receive(self, result: tuple, form: str) -> tuple:
        """Check what the user's reset or step returned, and keep what a turn may change."""
        fits = isinstance(result, tuple) and len(result) == form.count(",") + 1 and isinstance(result[0], str)
        if not fits:
            raise ValueError(f"{type(self.inner).__name__}.{form} expected, obs a str, got {result!r}"[:300])
        self.obs, self.info, inner = result[0], dict(result[-1] or {}), self.inner
        self.actions, self.rules = tuple(getattr(inner, "actions", ())), getattr(inner, "instruction", "")
        return result

    def start(self, seed: int) -> None:
        reset, form = self.inner.reset, str(inspect.signature(self.inner.reset))
        result = reset(seed=seed, options=self.options) if "options" in form or "**" in form else reset(seed)
        self.total, _ = 0.0, self.receive(result, "reset -> (obs, info)")

    def render(self) -> str:
        return self.obs

    def act(self, action: str) -> tuple[float, bool]:
        _, reward, terminated, self.truncated, _ = self.receive(
            self.inner.step(action), "step -> (obs, reward, terminated, truncated, info)")
        self.total += reward
        self.success = bool(getattr(self.inner, "success", self.total > 0))
        return reward, bool(terminated)


ENVS = {       # FORK: a variant is one line; a game of your own needs none, see UserEnv
    "bandit": Bandit,
    "bandit-test": partial(Bandit, arms=("Librarian", "Trader")),
    "bandit-rev": partial(Bandit, arms=("Trader", "Librarian")),      # RAGEN: its scripts swap the two
    "frozenlake": FrozenLake,
    "sokoban": Sokoban,
    "sokoban-large": partial(Sokoban, size=8, boxes=2),
    "sokoban-newvocab": partial(Sokoban, symbols="W.GCBA@"),
}


run_file = lru_cache(runpy.run_path)            # a user's file runs once, however many rows play it


def make_env(name: str, **overrides) -> Env:
    """An environment by name, settings overridden; "path/to/file.py:Class" loads a user's own."""
    if name in ENVS:
        return ENVS[name](**overrides)
    path, _, class_name = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(ENVS)}, or path/to/file.py:Class")
    try:
        cls = run_file(path)[class_name]
        cls.reset, cls.step          # the error names the one that is missing
        return UserEnv(cls, **overrides)
    except Exception as error:       # whatever the user's file raises, the flag is what to look at first
        raise ValueError(f"environment {name!r} (a class with reset, step): {error!r}") from error


def first_prompt(env: Env, obs: str, think: bool = True) -> str:
    """The first user message: the instruction, the form of a reply, turn header, state."""
    answer = " || ".join(["action"] * min(env.max_actions_per_turn, 2)) if env.actions else "your text"
    form = f"{'<think>your thoughts</think>' * think}<answer>{answer}</answer>"
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


# What a reply asks for: actions (list of str), valid, thought; surplus: actions cut beyond the turn's limit.
Parsed = namedtuple("Parsed", "actions valid thought surplus", defaults=(0,))


def reply_end(text: str, think: bool = True) -> int | None:
    """Where a reply stops: behind the first </answer> after </think> (not thinking: the first), or None."""
    start = text.find("</think>") if think else 0
    end = text.find("</answer>", start) if start >= 0 else -1
    return end + len("</answer>") if end >= 0 else None


def parse_response(text: str, actions: tuple, max_actions: int, think: bool = True) -> Parsed:
    """Read prefilled tag + reply. Never raises: a reply is valid as a whole, or it does nothing.

    The first answer behind the first </think> counts; text in the thought or around the answer does not.
    Its pieces between || are stripped, empty ones dropped; then all names must be known; then those beyond
    max_actions are cut. Tags count as written. actions=() takes any text that is not blank, as one action.

    >>> parse_response("<think>go</think><answer>up || LEFT</answer>", ("Up", "Left"), 5)
    Parsed(actions=['Up', 'Left'], valid=True, thought='go', surplus=0)
    >>> parse_response("<answer>Up || Fly</answer>", ("Up", "Left"), 5, think=False)
    Parsed(actions=[], valid=False, thought='', surplus=0)
    """
    thought = text.partition("</think>")[0].removeprefix("<think>").strip() if think else ""
    reply = text[text.find("</think>") if think else 0:reply_end(text, think) or 0]
    answer = reply.removesuffix("</answer>").partition("<answer>")[2]
    names = [known(part, actions) for part in (answer.split("||") if actions else [answer]) if part.strip()]
    if not names or None in names:
        return Parsed([], False, thought)
    return Parsed(names[:max_actions], True, thought, max(len(names) - max_actions, 0))


def random_success(env: Env, seed: int, draws: int = 16) -> float | None:
    """Share of successes of uniform valid actions, whole budget, on level `seed`; None for free text."""
    wins = 0
    for number in range(seed * draws, (seed + 1) * draws):
        env.reset(seed, {"noise_seed": number})
        env.actions_left, rng = env.room, stream(number, PLAY)
        while env.actions and not (env.terminated or env.truncated):
            env.step(rng.choice(env.actions))
        wins += env.success
    return wins / draws if env.actions else None


def play(env: Env, seed: int) -> None:
    """Play one level in the terminal."""
    obs, _ = env.reset(seed)
    print(f"{env.instruction}\nAn action or several (A || B), h: the solver's plan, q: quit.\n\n{obs}")
    while not (env.terminated or env.truncated) and (line := sys.stdin.readline().strip()) not in ("", "q"):
        parsed = parse_response(f"<answer>{line}</answer>", env.actions, env.max_actions_per_turn, False)
        for action in parsed.actions:
            obs, reward, *_ = env.step(action)
            print(f"{action}: reward {reward:.2f}, {env.actions_left} left\n{obs}")
        print(f"plan: {env.solve()}" if line == "h" else "" if parsed.valid else "no such action")
    print("solved" if env.success else "not solved")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Play a game in the terminal.")
    parser.add_argument("--env", default="sokoban", help=f"{', '.join(ENVS)} or path/to/file.py:Class")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    try:
        play(make_env(flags.env), flags.seed)
    except ValueError as error:
        parser.error(str(error))
