"""Rollouts: a batch of language-model agents plays several turns, and every id is kept as it was sampled.

Each row is an Episode: an environment and a growing list of ids. A reply's tokens are sampled and appended;
when it ends, its actions are played and the next observation's ids are appended; and so on until the
episode ends. Nothing is decoded and encoded again, so what the update trains on is, id for id, what the
model saw and said. The loss mask is True exactly where an id was sampled, and log-probability and entropy
are recorded at that moment.

RAGEN calls a generation engine once a turn on the whole re-encoded dialogue. Here one KV cache lives
through the episode and each token passes through the model once. Rows live in the cache in the order
[sampling | waiting | finished]:  a sampling row gets one more token a step; a row whose reply ended waits
until enough others do, then all of them act and their observations are fed in one forward pass; a finished
row costs nothing. A prompt that several rows share (a group's) is encoded once and copied.

In reading order: Trajectories, Episode, KVCache, sample, Engine, rollout, play_script, collect, probe.

    python rollout.py --env sokoban    # one trajectory, sampled and unsampled tokens told apart
"""
import argparse
import time
from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import torch
from transformers.cache_utils import Cache

from envs import first_prompt, make_env, next_prompt, opening_tag, parse_response, reply_end
from model import ChatFormat, cache_argument, context_length, first_line, load_policy, next_logits

MASKED = -1e30          # added to an attention score that must not count; finite in bfloat16 too
WAITING_SHARE = 1.0     # observations are fed once this share of the live rows waits (1: lockstep turns)


@dataclass
class Trajectories:
    """A batch of B dialogues of at most T tokens and K turns, right-padded. Every per-token tensor is
    aligned to the token it is about: logprobs[b, t] = log pi(tokens[b, t] | tokens[b, :t])."""
    tokens: torch.Tensor        # (B, T) long: every id the model was shown or sampled, in order
    loss_mask: torch.Tensor     # (B, T) bool: True iff the policy sampled this id
    logprobs: torch.Tensor      # (B, T) log pi_old of each sampled id under logits / temperature, 0 elsewhere
    entropies: torch.Tensor     # (B, T) the policy's entropy there, in nats, 0 elsewhere
    turn_ids: torch.Tensor      # (B, T) long: observation k and reply k carry k, padding -1
    rewards: torch.Tensor       # (B, K) what the environment paid in each turn
    penalties: torch.Tensor     # (B, K) format penalties (<= 0), kept apart
    lengths: torch.Tensor       # (B,) long
    group_ids: torch.Tensor     # (B,) long: rows of one group share a level
    success: torch.Tensor       # (B,) bool
    terminated: torch.Tensor    # (B,) bool: the environment ended it
    truncated: torch.Tensor     # (B,) bool: a budget or the context limit ended it
    context_cut: torch.Tensor   # (B,) bool: it was the context limit
    texts: list                 # (B) the dialogue as a person reads it
    infos: list                 # (B) {"turns": [{"reply", "thought", "actions", "valid", ...}], ...}

    def __len__(self) -> int:
        return len(self.lengths)

    def cpu(self) -> "Trajectories":
        """The same on the CPU."""
        return Trajectories(**{f.name: x.cpu() if torch.is_tensor(x) else x
                               for f in fields(self) for x in [getattr(self, f.name)]})

    def select(self, keep: torch.Tensor) -> "Trajectories":
        """The rows where `keep` (B,) bool is True, in order; every per-row field stays in step."""
        rows = keep.nonzero().flatten()
        return Trajectories(**{f.name: x[rows] if torch.is_tensor(x) else [x[i] for i in rows.tolist()]
                               for f in fields(self) for x in [getattr(self, f.name)]})


def join(parts: list[Trajectories]) -> Trajectories:
    """Batches of several ranks, one behind the other, padded to the longest row and the most turns."""
    def stack(name, values):
        if not torch.is_tensor(values[0]):
            return [item for value in values for item in value]
        if values[0].dim() == 1:
            return torch.cat(values)
        width, filler = max(value.shape[1] for value in values), -1 if name == "turn_ids" else 0
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1]), value=filler) for x in values])
    return Trajectories(*(stack(f.name, [getattr(x, f.name) for x in parts]) for f in fields(Trajectories)))


class Episode:
    """One row being played: an environment and the ids so far, sampled or not.

    The same object serves sampling and scripted play, so that ids, masks and turn ends have one source.
    """

    def __init__(self, env, chat: ChatFormat, seed: int, noise_seed: int, max_new_tokens: int,
                 max_context: int, think: bool, format_penalty: float):
        self.env, self.chat, self.think, self.format_penalty = env, chat, think, format_penalty
        self.max_new_tokens, self.max_context = max_new_tokens, max_context
        self.ids, self.sampled, self.turn_ids = [], [], []
        self.rewards, self.penalties, self.turns, self.text = [], [], [], ""
        self.used = self.drawn = 0                  # actions taken, ids sampled, so far
        self.terminated = self.truncated = self.context_cut = False
        self.tag = opening_tag(think)
        self.prefill = [] if think and chat.opens_thought else chat.encode(self.tag)
        began = time.perf_counter()
        self.observation, _ = env.reset(seed, options={"noise_seed": noise_seed})
        self.env_seconds, self.level = time.perf_counter() - began, self.observation
        self.show(first_prompt(env, self.observation, think), chat.first)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def append(self, ids: list[int], sampled: bool, turn: int) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.turn_ids += [turn] * len(ids)

    def show(self, text: str, encode) -> None:
        """Append an observation and open the next reply, or end the row when its reply would not fit in the
        context."""
        ids = encode(text) + self.prefill
        if len(self.ids) + len(ids) + self.max_new_tokens + len(self.chat.forced_end) > self.max_context:
            self.truncated = self.context_cut = True
            return
        self.append(ids, False, len(self.turns))
        self.reply = []                             # the ids of the reply in progress
        self.text += text + "\n"

    def take(self, token: int) -> bool:
        """Append one sampled id; True if it ends the reply: an end token, the closing </answer>, or the
        length limit."""
        self.append([token], True, len(self.turns))
        self.drawn += 1
        if token in self.chat.stop_ids:
            return True
        self.reply.append(token)
        if self.chat.closes_tag(token) and reply_end(self.tag + self.chat.decode(self.reply), self.think):
            return True
        return len(self.reply) >= self.max_new_tokens

    def act(self) -> None:
        """Play the reply's actions; then the episode is over, or the next observation stands at the end of
        the ids."""
        turn, env = len(self.turns), self.env
        if self.ids[-1] not in self.chat.stop_ids:
            self.append(self.chat.forced_end, False, turn)
        reply = self.chat.decode(self.reply)
        parsed = parse_response(self.tag + reply, env.actions, env.max_actions_per_turn, self.think)
        reward, played, began = 0.0, [], time.perf_counter()
        for action in parsed.actions:
            self.observation, paid, self.terminated, self.truncated, _ = env.step(action)
            reward, played, self.used = reward + paid, played + [action], self.used + 1
            if self.over:
                break
        self.env_seconds += time.perf_counter() - began
        self.rewards.append(reward)
        self.penalties.append(0.0 if parsed.valid else -self.format_penalty)
        self.turns.append({"reply": reply, "thought": parsed.thought, "actions": played,
                           "valid": parsed.valid, "surplus": parsed.surplus, "reward": reward})
        self.text += (f"{self.tag}{reply}\n[turn {turn + 1}: {' || '.join(played) or 'no valid action'}; "
                      f"reward {reward:.2f}]\n")
        if not self.over and len(self.turns) >= env.max_turns:
            self.truncated = True
        if not self.over:
            self.show(next_prompt(env, self.observation, reward, parsed.valid, turn + 2,
                                  env.max_actions - self.used), self.chat.following)


# ------------------------------------------------------------------------------------------------- sampling

class KVCache(Cache):
    """Keys and values of all rows in preallocated memory; slot s of a row holds its token s, so a slot is a
    position.

    Before a forward pass `at` names the rows it is about (a range) and the slots it fills; then `update`,
    called by every attention layer, writes the new keys and values there and returns a view of the rows'
    slots, nothing copied. Memory starts at zero: what a masked slot holds counts 0 times, and 0 x NaN is NaN.
    """

    def __init__(self, rows: int):
        super().__init__(layers=[])
        self.rows, self.capacity, self.keys, self.values = rows, 0, [], []

    def at(self, first: int, last: int, slots: torch.Tensor, needed: int, seen: int) -> "KVCache":
        """Rows first..last-1 write to `slots` (n, m), all < needed, and attend to slots < seen."""
        if needed > self.capacity:                  # grow rarely: by a half, never by a token
            self.capacity = max(needed, self.capacity * 3 // 2)
            for stores in (self.keys, self.values):
                for layer, store in enumerate(stores):
                    stores[layer] = store.new_zeros(*store.shape[:2], self.capacity, store.shape[3])
                    stores[layer][:, :, :store.shape[2]] = store
        self.first, self.last, self.slots, self.seen = first, last, slots, seen
        self.index = torch.arange(first, last, device=slots.device)[:, None].expand_as(slots)
        return self

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Store (n, H, m, D) keys and values; return those of all slots up to `seen`, each (n, H, seen,
        D)."""
        for stores, new in ((self.keys, key_states), (self.values, value_states)):
            if layer_idx == len(stores):
                stores.append(new.new_zeros(self.rows, new.shape[1], self.capacity, new.shape[3]))
            stores[layer_idx][self.index, :, self.slots] = new.transpose(1, 2)
        return tuple(stores[layer_idx][self.first:self.last, :, :self.seen]
                     for stores in (self.keys, self.values))

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        """Rows `targets` become copies of what rows `sources` held in their first `length` slots."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[sources, :, :length]


def sample(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float):
    """Draw one id a row by inverse CDF: the first id whose cumulative probability exceeds the row's own
    uniform number.

    logits (n, V), uniforms (n,) in [0, 1). Returns ids (n,), log-probabilities (n,), entropies (n,) in
    nats, under softmax(logits / temperature) and nothing else: no top-k, no penalty, whatever the model's
    generation_config asks for. Temperature 0 takes the best id and reports both at temperature 1.

    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> [sample(p.log(), torch.tensor([u]), 1.0)[0].item() for u in (0.1, 0.6, 0.9)]
    [0, 1, 2]
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    probs = logprobs.exp()
    if temperature == 0:
        ids = logprobs.argmax(-1)
    else:
        exact = torch.float32 if logits.device.type == "mps" else torch.float64
        cdf = probs.to(exact).cumsum(-1)
        ids = torch.searchsorted(cdf, uniforms[:, None].to(exact) * cdf[:, -1:], right=True).squeeze(-1)
        ids = ids.clamp(max=logits.shape[-1] - 1)
    entropies = -(probs * logprobs.clamp(min=MASKED)).sum(-1)           # 0 log 0 = 0
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1), entropies


def sampling_streams(sample_seed: int, group_ids: list[int], length: int) -> np.ndarray:
    """(B, length) uniforms. A row's stream is numbered by (sample_seed, group, member), a member being its
    order of appearance in its group: what a row draws depends on no neighbour and on no global state."""
    seen, rows = {}, []
    for group in group_ids:
        member = seen[group] = seen.get(group, -1) + 1
        rows.append(np.random.default_rng([sample_seed, group % 2**64, member]).random(length, np.float32))
    return np.stack(rows)


def attention_mask(config, visible: torch.Tensor, slots: torch.Tensor, dtype=torch.float32):
    """visible (n, m, S) bool -> additive (n, 1, m, S); by layer type where some see but a window (Gemma)."""
    full = torch.where(visible, 0.0, MASKED)[:, None].to(dtype)
    window = getattr(config, "sliding_window", None)
    if not window:
        return full
    near = slots[:, :, None] - torch.arange(visible.shape[2], device=slots.device) < window
    sliding = torch.where(visible & near, 0.0, MASKED)[:, None].to(dtype)
    mixed = {"full_attention": full, "sliding_attention": sliding}
    return mixed if getattr(config, "layer_types", None) else sliding


class Engine:
    """A model, its cache, and the order of the episodes in it:  [sampling | waiting | finished].

    `sampling` rows get one more token a step. `waiting` rows have ended a reply; their environments move
    and their observations are fed together, once there are enough of them.
    """

    def __init__(self, model, episodes: list[Episode], vocab_size: int):
        self.model, self.backbone, self.device = model.eval(), model.base_model, model.device     # no dropout
        self.cache_name, self.vocab_size = cache_argument(model), vocab_size
        self.dtype = getattr(model, "dtype", torch.float32)         # of the masks, too
        # cache row -> row of the batch (a row is over already if its first prompt did not fit)
        self.numbers = [row for row, episode in enumerate(episodes) if not episode.over]
        self.episodes = [episodes[i] for i in self.numbers]
        self.sampling, self.live = 0, len(self.episodes)
        # fed: cache row -> how many of its ids are in the cache
        self.fed, self.cache = [0] * self.live, KVCache(self.live)

    def forward(self, first: int, last: int) -> torch.Tensor:
        """Feed the ids that rows first..last-1 have and the cache has not; logits (n, V) of what comes next
        in each."""
        new = [episode.ids[fed:] for episode, fed in zip(self.episodes[first:last], self.fed[first:last])]
        lengths, width = [len(ids) for ids in new], max(len(ids) for ids in new)
        host = torch.tensor([ids + [0] * (width - len(ids)) for ids in new])                 # (n, m)
        lengths, starts = torch.tensor(lengths), torch.tensor(self.fed[first:last])
        needed, seen = int(starts.max()) + width, int((starts + lengths).max())
        tokens, lengths, starts = (x.to(self.device) for x in (host, lengths, starts))
        slots = starts[:, None] + torch.arange(width, device=self.device)                    # (n, m)
        last_slot = (starts + lengths - 1)[:, None]
        # A query sees the slots up to its own. Padding writes slots behind the row's end, which the row's
        # next ids overwrite before anything may see them; only its position is held back, for models with a
        # table of positions.
        visible = torch.arange(seen, device=self.device) <= slots[:, :, None]                # (n, m, seen)
        hidden = self.backbone(
            input_ids=tokens, position_ids=slots.minimum(last_slot), use_cache=True,
            attention_mask=attention_mask(self.model.config.get_text_config(), visible, slots, self.dtype),
            **{self.cache_name: self.cache.at(first, last, slots, needed, seen)}).last_hidden_state
        self.fed[first:last] = [len(episode.ids) for episode in self.episodes[first:last]]
        final = hidden[torch.arange(last - first, device=self.device), lengths - 1]          # (n, D)
        return next_logits(self.model, final)[:, :self.vocab_size]    # a head may have more logits than ids

    def encode_prompts(self) -> torch.Tensor:
        """Feed every distinct first prompt once and copy it to the other rows that have it; logits (B, V)."""
        prompts = {}
        for row, episode in enumerate(self.episodes):
            prompts.setdefault(tuple(episode.ids), []).append(row)
        order = [rows[0] for rows in prompts.values()]
        order += [row for rows in prompts.values() for row in rows[1:]]
        self.episodes, self.numbers = [self.episodes[i] for i in order], [self.numbers[i] for i in order]
        source = list(range(len(prompts))) + [i for i, rows in enumerate(prompts.values()) for _ in rows[1:]]
        logits = self.forward(0, len(prompts))
        self.fed = [self.fed[i] for i in source]
        self.cache.move(list(range(len(prompts), len(source))), source[len(prompts):], max(self.fed))
        self.sampling = len(source)
        return logits[source]

    def counters(self) -> torch.Tensor:
        """(3, n) long for the sampling rows: row of the batch, position of the next id, ids it has sampled
        so far."""
        rows = range(self.sampling)
        return torch.tensor([[self.numbers[i] for i in rows], [len(self.episodes[i].ids) for i in rows],
                             [self.episodes[i].drawn for i in rows]]).to(self.device)

    def take(self, ids: list[int]) -> None:
        """Give every sampling row its id; those whose reply ends by it wait."""
        ended = [self.episodes[i].take(token) for i, token in enumerate(ids)]
        self.sampling = self.partition(0, self.sampling, [not e for e in ended])

    def partition(self, first: int, last: int, stays: list[bool]) -> int:
        """Move the rows first..last-1 that stay in front of those that do not; returns where the latter
        begin. Rows are swapped in pairs, so that as little of the cache moves as can be."""
        border = first + sum(stays)
        holes = [i for i in range(first, border) if not stays[i - first]]
        fills = [i for i in range(border, last) if stays[i - first]]
        if holes:
            length = max(self.fed[i] for i in holes + fills)
            self.cache.move(holes + fills, fills + holes, length)
            for per_row in (self.episodes, self.numbers, self.fed):
                for i, j in zip(holes, fills):
                    per_row[i], per_row[j] = per_row[j], per_row[i]
        return border

    def advance(self) -> torch.Tensor | None:
        """One step: the sampling rows' new ids go through the model; when enough rows wait, they act and
        their observations go through it. Returns logits of all rows that sample next, None when all have
        finished."""
        logits = [self.forward(0, self.sampling)] if self.sampling else []
        waiting = self.live - self.sampling
        if waiting and waiting >= WAITING_SHARE * self.live:
            for episode in self.episodes[self.sampling:self.live]:
                episode.act()
            stays = [not episode.over for episode in self.episodes[self.sampling:self.live]]
            self.live = self.partition(self.sampling, self.live, stays)
            if self.live > self.sampling:
                logits.append(self.forward(self.sampling, self.live))
            self.sampling = self.live
        return torch.cat(logits) if logits else None


@torch.no_grad()
def rollout(model, tokenizer, envs, seeds, noise_seeds, group_ids, *, temperature: float = 1.0,
            max_new_tokens: int = 100, sample_seed: int = 0, think: bool = True, format_penalty: float = 0.1,
            max_context: int | None = None, script=None, progress=None) -> Trajectories:
    """Play one episode a row, all rows together.

    envs: B environments (reset here). seeds, noise_seeds, group_ids: B integers each, lists or tensors; a
    seed is a level, a noise seed its luck. temperature: 0 is greedy. max_new_tokens: limit of one reply.
    sample_seed: which stream of uniforms; training counts it up with the iterations. max_context: tokens a
    row may have, at most what the model declares. script: a function (env, row) -> reply text that plays
    instead of the model (which may be None then). progress: called after every step with the number of
    finished rows. Raises ValueError when not even a first prompt fits in the context.
    """
    seeds, noise_seeds, group_ids = (torch.as_tensor(x).tolist() for x in (seeds, noise_seeds, group_ids))
    chat = ChatFormat(tokenizer, model, think)
    limit = min([n for n in (max_context, context_length(model)) if n], default=1 << 30)
    episodes = [Episode(env, chat, seed, noise_seed, max_new_tokens, limit, think, format_penalty)
                for env, seed, noise_seed in zip(envs, seeds, noise_seeds, strict=True)]
    if all(episode.over for episode in episodes):
        raise ValueError(f"--max_new_tokens {max_new_tokens}: no first prompt leaves room for that in a "
                         f"context of {limit} tokens")
    play = play_script(episodes, script) if script else sample_replies(
        model, tokenizer, episodes, group_ids, temperature, sample_seed, progress)
    return collect(episodes, group_ids, *play, pad=tokenizer.pad_token_id or 0)


def sample_replies(model, tokenizer, episodes, group_ids, temperature, sample_seed, progress):
    """The decoding loop. Returns (places (2, N), logprobs (N,), entropies (N,)) of all sampled tokens, on
    the device."""
    engine = Engine(model, episodes, len(tokenizer))
    longest = max(episode.env.max_turns * episode.max_new_tokens for episode in episodes)
    uniforms = torch.from_numpy(sampling_streams(sample_seed, group_ids, longest)).to(model.device)
    places, logprobs, entropies = [], [], []
    logits = engine.encode_prompts()
    while logits is not None:
        row, position, drawn = engine.counters()
        ids, logprob, entropy = sample(logits, uniforms[row, drawn], temperature)
        places.append(torch.stack([row, position]))
        logprobs.append(logprob)
        entropies.append(entropy)
        engine.take(ids.tolist())                   # the step's one host synchronisation
        logits = engine.advance()
        if progress:
            progress(len(episodes) - engine.live)
    return torch.cat(places, 1), torch.cat(logprobs), torch.cat(entropies)


def play_script(episodes, script):
    """Replies written by `script`, encoded and taken as if they had been sampled; their log-probabilities
    are 0."""
    for row, episode in enumerate(episodes):
        while not episode.over:
            for token in [*episode.chat.encode(script(episode.env, row)), episode.chat.end_id]:
                if episode.take(token):
                    break
            episode.act()
    return torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), torch.zeros(0)


def collect(episodes: list[Episode], group_ids, places, logprobs, entropies, pad: int) -> Trajectories:
    """The played episodes as tensors on the device that the records are on."""
    device, shape = places.device, (len(episodes), max(len(episode.ids) for episode in episodes))
    turns = max(1, max(len(episode.turns) for episode in episodes))

    def rectangle(rows, width, filler, dtype):
        padded = [[*row, *[filler] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=dtype, device=device)

    def scatter(values):
        out = torch.zeros(shape, device=device)
        out[places[0], places[1]] = values
        return out

    def column(values, dtype):
        return torch.tensor(list(values), dtype=dtype, device=device)

    return Trajectories(
        tokens=rectangle((e.ids for e in episodes), shape[1], pad, torch.long),
        loss_mask=rectangle((e.sampled for e in episodes), shape[1], False, torch.bool),
        logprobs=scatter(logprobs), entropies=scatter(entropies),
        turn_ids=rectangle((e.turn_ids for e in episodes), shape[1], -1, torch.long),
        rewards=rectangle((e.rewards for e in episodes), turns, 0.0, torch.float32),
        penalties=rectangle((e.penalties for e in episodes), turns, 0.0, torch.float32),
        lengths=column((len(e.ids) for e in episodes), torch.long), group_ids=column(group_ids, torch.long),
        success=column((bool(e.env.success) for e in episodes), torch.bool),
        **{flag: column((getattr(e, flag) for e in episodes), torch.bool)
           for flag in ("terminated", "truncated", "context_cut")},
        texts=[e.text for e in episodes],
        infos=[{"turns": e.turns, "level": e.level, "env_seconds": e.env_seconds} for e in episodes])


def demo(name: str, model_name: str, seed: int) -> None:
    """Play one group with the model and print its first trajectory: what was sampled in colour, the rest
    plain."""
    from starpo import episode_rewards, grpo_advantages
    model, tokenizer = load_policy(model_name)
    group = range(8)
    batch = rollout(model, tokenizer, [make_env(name) for _ in group], [seed] * 8, group, [0] * 8)
    row = zip(batch.tokens[0][:batch.lengths[0]].tolist(), batch.loss_mask[0].tolist())
    print("".join(f"\033[1;32m{tokenizer.decode([token])}\033[0m" if sampled else tokenizer.decode([token])
                  for token, sampled in row))
    returns = episode_rewards(batch.rewards, batch.penalties)
    print(f"\nsampled tokens (bold green): {int(batch.loss_mask[0].sum())} of {int(batch.lengths[0])}")
    for turn, played in enumerate(batch.infos[0]["turns"]):
        print(f"turn {turn + 1}: {' || '.join(played['actions']) or 'no valid action'}  "
              f"reward {batch.rewards[0, turn]:.2f}  penalty {batch.penalties[0, turn]:.2f}")
    print(f"rewards of the group {[round(r, 2) for r in returns.tolist()]}\n"
          f"GRPO advantage of this trajectory {grpo_advantages(returns, batch.group_ids)[0]:.3f}")


@torch.no_grad()
def probe(name: str, model) -> None:
    """Refuse, with one line, a model that scores a packed row unlike single rows: its layers ignore masks, or
    its head does something unknown. Raises ValueError."""
    from starpo import token_logprobs
    # 300 ids: more than the windows of local attention (GPT-Neo's 256)
    tokens = torch.arange(600, device=model.device).view(2, 300)[:, :context_length(model)] % 50
    tokens[1, :8], sampled = tokens[0, :8], torch.ones_like(tokens).cumsum(1) > 8
    try:
        logits = model(input_ids=tokens).logits                                         # (2, 300, V)
        plain = torch.log_softmax(logits.float(), -1)[:, 7:-1].gather(2, tokens[:, 8:, None])[..., 0]
        apart = (token_logprobs(model, tokens, sampled, [0, 0])[0][:, 8:] - plain).abs().mean().item()
    except Exception as error:          # recurrent models, and whatever else knows no masks
        apart = first_line(error)
    if isinstance(apart, str) or not apart < (1e-3 if logits.dtype == torch.float32 else 0.02):
        raise ValueError(f"--model {name}: cannot be trained on packed rows (log-probs apart: {apart})")


def toy_batch() -> None:
    """Two groups of two trajectories, two turns of two tokens each, through every formula of starpo.py."""
    import starpo
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=110)
    (model, _), tokens = load_policy("tiny", "cpu"), torch.arange(40).view(4, 10)
    tokens[1::2, :3] = tokens[::2, :3]                                # members of a group share the prompt
    mask, turn_ids = torch.tensor([[0, 0, 0, 1, 1] * 2, [0] * 5 + [1] * 5])[:, None].expand(2, 4, 10)
    b = SimpleNamespace(tokens=tokens, loss_mask=mask, turn_ids=turn_ids, group_ids=torch.arange(4) // 2)
    b.rewards = torch.tensor([[0., 1], [0, 0], [0.5, 0.5], [1, 0]])
    b.penalties = torch.tensor([[0., 0], [-0.1, 0], [0, 0], [0, 0]])
    b.logprobs = starpo.token_logprobs(model, tokens, mask, b.group_ids)[0].detach()
    rewards = starpo.episode_rewards(b.rewards, b.penalties)
    shown = {"episode rewards": rewards, "keep=0.5": starpo.filter_groups(rewards, b.group_ids, 0.5),
             "token rewards": starpo.place_rewards(b.rewards + b.penalties, mask, turn_ids),
             "packed row": starpo.pack(tokens, mask, b.group_ids)[0][0], "weights": starpo.loss_weights(mask)}
    for x in ("grpo", "gae", "bilevel"):
        shown[f"{x} advantages"] = starpo.compute_advantages(x, b, torch.zeros(4, 10))[0]
    shown["update"] = starpo.update(model, torch.optim.AdamW(model.parameters()), b, shown["grpo advantages"])
    print(*(f"{name}\n{value}\n" for name, value in shown.items()), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print one trajectory, its mask, rewards and advantage.")
    parser.add_argument("--env", default="sokoban")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    try:
        demo(flags.env, flags.model, flags.seed)
    except ValueError as error:
        parser.error(str(error))
