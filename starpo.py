"""StarPO: policy optimisation over whole agent trajectories (RAGEN, arXiv 2504.20073), by hand in torch.

A trajectory is a row of ids: prompt, reply, observation, reply, ... `loss_mask` marks those the policy
sampled: they alone are actions, with advantages, values, log-probs and gradient. In reading order:

    episode_rewards -> filter_groups (StarPO-S) -> grpo_advantages, or gae / bilevel_gae and whiten
    pack -> token_logprobs, token_values -> policy_loss, value_loss -> update -> indicators

Unlike RAGEN: observations get no gradient and GAE steps over them; turn ends come from turn_ids, not from
non-zero rewards; the filter ranks raw rewards; a mean is over the minibatch, so micro-batches change nothing;
a prompt that group members share is computed once. Slots outside the mask may hold anything, even NaN. Every
per-token tensor is aligned to the token it is about; the causal shift is in hidden_of_sampled alone.

Shapes: B trajectories, T tokens, K turns, P groups, V vocabulary, N sampled tokens, D hidden, L positions of
a packed row. Run alone: `python starpo.py` walks a toy batch from rewards to update.
"""
import math
from collections import Counter, defaultdict, namedtuple

import torch
from torch import distributed
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

STD_THRESHOLD = 1e-6      # a group's rewards are equal, no signal, if their std <= this * (1 + |mean|)
ROW_WIDTH = 2048          # positions of a packed row, which the backbone sees at once
LOGITS_ELEMENTS = 2**25   # floats of (tokens, vocabulary) alive at once: 128 MiB

# ------------------------------------------------------------------------------------ rewards, group filter
def masked_mean(x, mask):
    """Mean of x where mask is True, a scalar; 0 on an empty mask.
    >>> masked_mean(torch.tensor([1., 3., math.nan]), torch.tensor([True, True, False])).item()
    2.0
    """
    return torch.where(mask.bool(), x, 0).sum() / mask.bool().sum().clamp(min=1)

def episode_rewards(rewards, penalties):
    """R (B,): sum of turn rewards and (negative) format penalties (B, K). For filter, GRPO and logs."""
    return (rewards + penalties).sum(dim=1)

def group_stats(rewards, group_ids):
    """rewards, group_ids (B,) -> index (B,) of each row's group, by ascending id; size, mean, population std
    and whether all rewards are equal (P,). In float64 on the CPU: some accelerators have none."""
    rewards = rewards.detach().cpu().double()
    _, index, size = torch.as_tensor(group_ids).cpu().unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(size)).double().index_add(0, index, rewards) / size
    std = (torch.zeros_like(mean).index_add(0, index, (rewards - mean[index]) ** 2) / size).sqrt()
    return index, size, mean, std, std <= STD_THRESHOLD * (1 + mean.abs())

def filter_groups(rewards, group_ids, keep=0.25):
    """StarPO-S's uncertainty filter (section 4.2): train on the groups whose members' rewards differ most.

    rewards (B,) raw episode rewards, group_ids (B,) any integers, keep in [0, 1] -> (B,) bool: the rows of
    the max(1, floor(keep * P)) groups with the largest population std; ties, up to rounding, to the smaller
    id. With keep < 1 groups of equal rewards are never kept, so perhaps none. Raises ValueError.
    >>> filter_groups(torch.tensor([1., 1., 0., 1., 0., 2.]), torch.tensor([5, 5, 6, 6, 7, 7]), keep=0.34)
    tensor([False, False, False, False,  True,  True])
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is the share of groups to train on, from 0 to 1; got {keep}")
    index, size, _, std, equal = group_stats(rewards, group_ids)
    usable = ~equal & std.isfinite() | (keep == 1)
    signal, order = torch.where(usable, std, 0).sort(descending=True)                # most uncertain first
    rank = torch.zeros_like(order)
    rank[order[1:]] = (signal[:-1] - signal[1:] > 1e-6 * signal[:-1]).cumsum(0)      # the same rank: a tie
    best = rank.argsort(stable=True)[:max(1, math.floor(keep * len(size) + 1e-9))]
    kept = torch.isin(torch.arange(len(size)), best) & usable
    return kept[index].to(rewards.device)

# ----------------------------------------------------------------------------------------------- advantages
def grpo_advantages(rewards, group_ids, normalize_std=True):
    """GRPO: how much better than its group. Episode rewards and group_ids (B,) -> (B,).

        A = (R - mean) / (std + 1e-6)      unbiased std; no division if not normalize_std (Dr. GRPO)

    Exactly 0 where a group's rewards are equal, so also for a group of one.

    >>> grpo_advantages(torch.tensor([0., 2., 7.]), torch.tensor([3, 3, 1]), normalize_std=False)
    tensor([-1.,  1.,  0.])
    """
    index, size, mean, std, equal = group_stats(rewards, group_ids)
    advantages = rewards.detach().cpu().double() - mean[index]
    if normalize_std:
        advantages = advantages / ((std * (size / (size - 1).clamp(min=1)).sqrt())[index] + 1e-6)
    return torch.where((equal | (size == 1))[index], 0, advantages).to(rewards.device, (rewards * 1.0).dtype)

def whiten(x, loss_mask):
    """(x - mean) / (population std + 1e-8) over all sampled tokens, 0 elsewhere; all (B, T).

    >>> whiten(torch.tensor([[1., 3., 99.]]), torch.tensor([[True, True, False]]))
    tensor([[-1.,  1.,  0.]])
    """
    mask, x64 = loss_mask.bool().cpu(), x.detach().cpu().double()    # float32 would not give 0 for equal x
    centred = torch.where(mask, x64 - masked_mean(x64, mask), 0)
    return (centred / (masked_mean(centred ** 2, mask).sqrt() + 1e-8)).to(x)

def turn_table(turn_rewards, loss_mask, turn_ids):
    """Where turns begin and end. turn_rewards (B, K), loss_mask, turn_ids (B, T) -> four (B, K) tensors: the
    reward to pay, whether the turn has sampled tokens, the index of its first and of its last one.

    Rewards of turns that a row does not have are ignored. That of a turn without sampled tokens goes to the
    nearest earlier turn with some, else to the nearest later one; with nothing sampled, nobody is paid.
    """
    turns, last_t = torch.arange(turn_rewards.shape[1], device=turn_ids.device), turn_ids.shape[1] - 1
    of_turn = turn_ids[:, None, :] == turns[:, None]                                 # (B, K, T)
    sampled = of_turn & loss_mask.bool()[:, None, :]
    has = sampled.any(dim=2)                                                         # (B, K)
    first, last = sampled.int().argmax(dim=2), last_t - sampled.flip(2).int().argmax(dim=2)
    earlier = torch.where(has, turns, -1).cummax(dim=1).values
    payee = torch.where(earlier < 0, has.int().argmax(dim=1, keepdim=True), earlier)
    rewards = torch.where(of_turn.any(dim=2), turn_rewards, 0)
    return torch.where(has, torch.zeros_like(rewards).scatter_add(1, payee, rewards), 0), has, first, last

def place_rewards(turn_rewards, loss_mask, turn_ids):
    """Pay turn k's reward for its last sampled token (see turn_table). (B, K), (B, T), (B, T) -> (B, T).

    >>> place_rewards(torch.tensor([[5, 2]]), torch.tensor([[0, 1, 1, 0]]), torch.tensor([[0, 0, 1, 1]]))
    tensor([[0, 5, 2, 0]])
    """
    paid, _, _, last = turn_table(turn_rewards, loss_mask, turn_ids)
    return paid.new_zeros(loss_mask.shape).scatter_add(1, last, paid)

@torch.no_grad()
def gae(token_rewards, values, loss_mask, gamma=1.0, lam=1.0, segment_ends=None):
    """Generalised advantage estimation over the sampled tokens (Schulman et al. 2016); all (B, T).

        delta_t = r_t + gamma V_t' - V_t      t': the next sampled token; V = 0 after the last one
        A_t     = delta_t + gamma lam A_t'    returns = A + V

    values[b, t] is the value of the state in which token t was chosen. segment_ends (B, T) bool: tokens after
    which the recursion starts anew. Returns advantages, returns, 0 where loss_mask is False. lam: 0.95 to 1.
    >>> rewards, values = torch.tensor([[0., 9., 1.]]), torch.tensor([[0.5, math.nan, 0.25]])
    >>> gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=0.5)[0]
    tensor([[0.0000, 0.0000, 0.7500]])
    """
    mask = loss_mask.bool()
    rewards, values = torch.where(mask, token_rewards, 0), torch.where(mask, values, 0)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0] + values[:, 0])     # (B,)
    goes_on, columns = torch.ones_like(mask) if segment_ends is None else ~segment_ends, []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value * goes_on[:, t] - values[:, t]
        advantage = delta + gamma * lam * next_advantage * goes_on[:, t]
        columns.append(torch.where(mask[:, t], advantage, 0))
        next_value = torch.where(mask[:, t], values[:, t], next_value)   # carried over what was not sampled
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    advantages = torch.stack(columns[::-1], dim=1)                                   # (B, T)
    return advantages, advantages + values

@torch.no_grad()
def bilevel_gae(turn_rewards, values, loss_mask, turn_ids, gamma_turn=0.95, lam_turn=1.0, gamma=1.0, lam=1.0):
    """Bi-level GAE: credit between turns, then inside each. turn_rewards (B, K), others (B, T).

        delta_k = r_k + gamma_turn V_{k+1} - V_k      V_k: at turn k's first sampled token; 0 after the last
        A_k     = delta_k + gamma_turn lam_turn A_{k+1}
        inside turn k: gae with terminal reward A_k + V_k and next value 0

    All four constants at 1 give gae. Returns advantages, returns (B, T), 0 where loss_mask is False.
    >>> mask, turn_ids = torch.tensor([[1, 0, 1]]), torch.tensor([[0, 1, 1]])
    >>> bilevel_gae(torch.tensor([[0., 1.]]), torch.zeros(1, 3), mask, turn_ids, gamma_turn=0.5)[0]
    tensor([[0.5000, 0.0000, 1.0000]])
    """
    paid, has, first, last = turn_table(turn_rewards, loss_mask, turn_ids)
    turn_values = torch.where(has, values.gather(1, first), 0)                       # (B, K)
    next_value = next_advantage = torch.zeros_like(paid[:, 0] + turn_values[:, 0])   # (B,)
    terminal = []
    for k in reversed(range(has.shape[1])):
        delta = paid[:, k] + gamma_turn * next_value - turn_values[:, k]
        advantage = delta + gamma_turn * lam_turn * next_advantage
        terminal.append(torch.where(has[:, k], advantage + turn_values[:, k], 0))
        next_value = torch.where(has[:, k], turn_values[:, k], next_value)
        next_advantage = torch.where(has[:, k], advantage, next_advantage)
    terminal = torch.stack(terminal[::-1], dim=1)                                    # (B, K)
    token_rewards = terminal.new_zeros(loss_mask.shape).scatter_add(1, last, terminal)
    turn_ends = torch.zeros_like(turn_ids).scatter_add(1, last, has.to(turn_ids.dtype)) > 0
    return gae(token_rewards, values, loss_mask, gamma, lam, segment_ends=turn_ends)

def compute_advantages(estimator, batch, values=None, ref_logprobs=None, *, kl_coef=0.0, gamma=1.0, lam=1.0,
                       gamma_turn=0.95, lam_turn=1.0, normalize_std=True):
    """Kept trajectories -> advantages (B, T), returns (B, T) or None.

    batch: anything with the tensors of a Trajectories. estimator: "grpo", "gae" or "bilevel" (or ValueError);
    the latter two need values (B, T), are whitened, and with ref_logprobs pay kl_coef * (logp_old - logp_ref)
    less (vanilla StarPO: 0.001). With GRPO, update puts KL into the loss.
    """
    mask, turn_rewards = batch.loss_mask.bool(), batch.rewards + batch.penalties
    if estimator == "grpo":
        advantages = grpo_advantages(turn_rewards.sum(dim=1), batch.group_ids, normalize_std)
        return torch.where(mask, advantages[:, None], 0), None
    if estimator not in ("gae", "bilevel") or values is None:
        raise ValueError(f"estimator is grpo, gae or bilevel, the last two with values; got {estimator!r}")
    values, kl = values.to(mask.device), torch.zeros_like(batch.logprobs)
    if kl_coef and ref_logprobs is not None:
        kl = kl_coef * torch.where(mask, batch.logprobs - ref_logprobs.to(mask.device), 0)           # k1
    if estimator == "gae":
        token_rewards = place_rewards(turn_rewards, mask, batch.turn_ids) - kl
        advantages, returns = gae(token_rewards, values, mask, gamma, lam)
    else:
        turn_rewards = turn_rewards.scatter_add(1, batch.turn_ids.clamp(min=0), -kl)
        advantages, returns = bilevel_gae(turn_rewards, values, mask, batch.turn_ids,
                                          gamma_turn, lam_turn, gamma, lam)
    return whiten(advantages, mask), returns

# ----------------------------------------------------------------------------- packing and masked log-probs
Piece = namedtuple("Piece", "member start stop prefix")     # prefix: the number of that piece in the row

def pack(tokens, loss_mask, group_ids=None, width=None):
    """Lay trajectories into packed rows: [prefix of a group | tail | tail | prefix of the next | tail ...].

    tokens, loss_mask (B, T), group_ids (B,) or None; rows of width positions or one trajectory. The prefix
    is the longest run of ids common to a group's members before any member's first sampled token: ids are
    compared, group_ids is a mere hint. Ids are read up to the last sampled one, which is only predicted.
    Returns rows, lists of Pieces (a prefix is its own); row (B,) and column (B, T), where ids stand (row -1:
    nothing sampled), on the CPU. Raises ValueError if a first id is sampled.
    >>> rows = pack(torch.tensor([[7, 8, 1], [7, 9, 2]]), torch.tensor([[0, 0, 1], [0, 0, 1]]), [5, 5])[0]
    >>> [(p.start, p.stop, p.prefix) for p in rows[0]]
    [(0, 1, 0), (1, 2, 0), (1, 2, 0)]
    """
    tokens, sampled = tokens.cpu(), loss_mask.bool().cpu()
    if sampled[:, :1].any():
        raise ValueError("loss_mask marks a row's first id as sampled: there is nothing to predict it from")
    B, T = tokens.shape
    used = (sampled * torch.arange(T)).amax(dim=1).tolist()     # ids to read = index of the last sampled one
    first = sampled.int().argmax(dim=1)
    groups = defaultdict(list)
    for b, key in enumerate(range(B) if group_ids is None else torch.as_tensor(group_ids).tolist()):
        groups[key] += [b] if used[b] else []
    width = max(width or ROW_WIDTH, *used, 1)
    rows, row, column, c = [], torch.full((B,), -1), torch.zeros(B, T, dtype=torch.long), width
    for members in (groups[key] for key in sorted(groups) if groups[key]):
        run = tokens[members, :int(first[members].min())]
        shared = int((run == run[:1]).all(dim=0).long().cumprod(dim=0).sum())
        prefix_at = None                                         # its column in the row that is being filled
        for b in members:
            if prefix_at is None or c + used[b] - shared > width:
                if c + used[b] > width:
                    rows, c = rows + [[]], 0
                number, prefix_at, c = len(rows[-1]), c, c + shared
                rows[-1].append(Piece(b, 0, shared, number))
            rows[-1].append(Piece(b, shared, used[b], number))
            column[b, :shared] = torch.arange(prefix_at, prefix_at + shared)
            column[b, shared:used[b]] = torch.arange(c, c + used[b] - shared)
            row[b], c = len(rows) - 1, c + used[b] - shared
    return rows, row, column

def attention_mask(pieces, position, dtype, window=None):
    """Which keys j a query i of a packed row may see -> additive (1, 1, L, L): 0, or the dtype's minimum."""
    lengths, lowest = [piece.stop - piece.start for piece in pieces], torch.finfo(dtype).min
    mask = torch.full((len(position),) * 2, lowest, dtype=dtype, device=position.device)
    for i, (piece, rows) in enumerate(zip(pieces, mask.split(lengths))):
        block = rows.split(lengths, dim=1)
        block[piece.prefix].zero_()                                   # j in i's prefix,
        block[i].fill_(lowest).triu_(1)                               # or in i's piece and not behind i
    if window:                                                        # a layer that looks back only so far
        mask.masked_fill_(position[:, None] - position >= window, lowest)
    return mask[None, None]

class SkipMasked(TorchFunctionMode):
    """While open, attention over a packed row is computed in runs of pieces: a prefix on itself, a tail on
    its prefix and itself, short neighbours in one call. torch's kernels would score all L x L pairs, masked
    or not. It changes no result; a model that does not call scaled_dot_product_attention goes without."""

    def __init__(self, pieces):
        super().__init__()
        self.lengths, self.near, self.masks = [], [], {}              # near: the runs that a run may see
        for i, piece in enumerate(pieces):
            n, run = piece.stop - piece.start, len(self.lengths)
            if piece.prefix != i and self.lengths[-1] * n <= 64 ** 2:     # pairs, cheaper than a call
                self.lengths[-1] += n
            else:
                home = run if piece.prefix == i else home             # the run that its prefix is in
                self.near, self.lengths = self.near + [sorted({home, run})], self.lengths + [n]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """args: query, key, value (1, H, L, D); kwargs["attn_mask"] (1, 1 or H, L, L) -> (1, H, L, D)."""
        kwargs = kwargs or {}
        mask, L = kwargs.pop("attn_mask", None), sum(self.lengths)
        if function is not scaled_dot_product_attention or mask is None or mask.shape[-2:] != (L, L):
            return function(*args, **kwargs, **({} if mask is None else {"attn_mask": mask}))
        if id(mask) not in self.masks:                                # cut once a mask, not once a layer
            cut = [rows.split(self.lengths, dim=3) for rows in mask.split(self.lengths, dim=2)]
            self.masks[id(mask)] = mask, [torch.cat([rows[j] for j in near], dim=3)
                                          for rows, near in zip(cut, self.near)]
        q, k, v = (x.split(self.lengths, dim=2) for x in args)
        return torch.cat([scaled_dot_product_attention(
            q[i], *(torch.cat([x[j] for j in near], dim=2) for x in (k, v)), attn_mask=cut, **kwargs)
            for i, (near, cut) in enumerate(zip(self.near, self.masks[id(mask)][1]))], dim=2)

def hidden_of_sampled(backbone, tokens, loss_mask, group_ids=None):
    """The hidden states that predict the sampled tokens (N, D), and the tokens' rows and columns in (B, T).

    backbone: a transformers base model; set to eval mode: with dropout equal weights have no ratio of 1."""
    weight, config = next(backbone.eval().parameters()), backbone.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    rows, row, column = pack(tokens, loss_mask, group_ids)
    b, t = loss_mask.bool().cpu().nonzero(as_tuple=True)
    starts = torch.tensor([0] + [sum(p.stop - p.start for p in pieces) for pieces in rows]).cumsum(0)
    at = starts[row[b]] + column[b, t - 1]          # the causal shift: t is predicted where t - 1 is read
    hidden = [weight.new_zeros(0, config.hidden_size)]
    for pieces in rows:                             # row by row: no padding goes through the model
        ids = torch.cat([tokens[p.member, p.start:p.stop] for p in pieces])[None].to(weight.device)  # (1, L)
        position = torch.cat([torch.arange(p.start, p.stop) for p in pieces]).to(weight.device)
        mask = attention_mask(pieces, position, weight.dtype, window)
        if kinds and window:                        # Gemma and others: a mask for each type of layer
            full = attention_mask(pieces, position, weight.dtype)
            mask = {"full_attention": full, "sliding_attention": mask}
        with SkipMasked(pieces):
            out = backbone(input_ids=ids, attention_mask=mask, position_ids=position[None], use_cache=False)
        hidden.append(out.last_hidden_state[0])
    b, t, at = (x.to(weight.device) for x in (b, t, at))
    return torch.cat(hidden)[at], b, t

def score_chunk(model, hidden, targets, temperature, with_entropy, vocab_size):
    """hidden (n, D), targets (n,) -> their log-probs (n,), and the entropies (n,) or None, in float32."""
    config, logits = model.config.get_text_config(), model.get_output_embeddings()(hidden).float()
    logits = logits[:, :vocab_size]              # (n, V); there may be more logits than the tokenizer has ids
    cap, scale = getattr(config, "final_logit_softcapping", None), temperature or 1.0    # 0, greedy: as at 1
    logits = torch.tanh(logits / cap) * cap if cap else logits                       # Gemma 2
    scale = scale * (getattr(config, "logits_scaling", None) or 1.0)                 # Granite
    logits = logits if scale == 1 else logits / scale
    log_z = logits.logsumexp(dim=1, keepdim=True)
    logprobs = (logits.gather(1, targets[:, None]) - log_z)[:, 0]
    return logprobs, torch.special.entr((logits - log_z).exp()).sum(dim=1) if with_entropy else None

def token_logprobs(model, tokens, loss_mask, group_ids=None, temperature=1.0, with_entropy=False,
                   vocab_size=None):
    """log pi(tokens[b, t] | tokens[b, :t]) of every sampled token, under logits / temperature.

    model: a transformers causal LM; tokens, loss_mask (B, T); group_ids (B,): rows that may share a prompt, a
    hint that saves time and changes nothing; vocab_size: the tokenizer's length, ids beyond are impossible.
    Returns logprobs (B, T) and entropy (B, T) in nats or None, 0 where loss_mask is False, with gradient, on
    the model's device. Raises ValueError if a row's first id is marked as sampled.
    """
    hidden, b, t = hidden_of_sampled(model.base_model, tokens, loss_mask, group_ids)
    targets = tokens.to(hidden.device)[b, t]                                         # (N,)
    n, parts = max(1, LOGITS_ELEMENTS // len(model.get_output_embeddings().weight)), []
    for h, y in zip(hidden.split(n), targets.split(n)):
        call = (score_chunk, model, h, y, temperature, with_entropy, vocab_size)
        # Too many logits (8,192 tokens x 151,936 ids are 5 GB): made in chunks, and once more in backward.
        parts.append(checkpoint(*call, use_reentrant=False) if len(hidden) > n else score_chunk(*call[1:]))
    logprobs, entropy = zip(*parts)
    zeros = torch.zeros(tokens.shape, device=hidden.device)
    return (zeros.index_put((b, t), torch.cat(logprobs)),
            zeros.index_put((b, t), torch.cat(entropy)) if with_entropy else None)

def token_values(critic, tokens, loss_mask, group_ids=None):
    """critic.head on critic.backbone: value of the state each sampled token was chosen in, (B, T); else 0."""
    hidden, b, t = hidden_of_sampled(critic.backbone, tokens, loss_mask, group_ids)
    values = critic.head(hidden.to(critic.head.weight.dtype))[:, 0].float()          # (N,)
    return torch.zeros(tokens.shape, device=hidden.device).index_put((b, t), values)

# --------------------------------------------------------------------------------------------------- losses
def loss_weights(loss_mask, token_mean=False):
    """What each token counts in a loss, (B, T) -> (B, T): 0 if not sampled, summing to 1 (to 0 if none is).

    The mean over a trajectory's sampled tokens, then over trajectories with any (paper eq. 4, 6); token_mean:
    over all sampled tokens. Made once a minibatch, so micro-batches change nothing.
    >>> loss_weights(torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]])).tolist()
    [[0.25, 0.25, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    """
    mask = loss_mask.bool().float()
    length = mask.sum(dim=1, keepdim=True)                                           # (B, 1)
    total = length.sum() if token_mean else length * (length > 0).sum()
    return mask / total.clamp(min=1)

def policy_loss(logprobs, old_logprobs, advantages, loss_mask, clip_ratio_low=0.2, clip_ratio_high=0.28,
                weights=None):
    """PPO's clipped surrogate over sampled tokens (paper eq. 4, 6); all (B, T). No dual clip.

        ratio = pi / pi_old
        loss  = - sum w min(ratio A, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

    w: weights, by default loss_weights(loss_mask). StarPO-S clips later above (0.28): rare tokens may grow.
    Returns the loss and scalar tensors: clip_frac (of sampled tokens), ratio_max_dev, kl_old.
    >>> one = torch.ones(1, 1)
    >>> print(policy_loss(one * math.log(2), one * 0, one * 3, one)[0])       # ratio 2, clipped to 1.28
    tensor(-3.8400)
    """
    mask = loss_mask.bool()
    weights = loss_weights(mask) if weights is None else torch.where(mask, weights, 0)
    log_ratio, advantages = torch.where(mask, logprobs - old_logprobs, 0), torch.where(mask, advantages, 0)
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    with torch.no_grad():
        return loss, {"clip_frac": masked_mean(clipped < unclipped, mask),
                      "ratio_max_dev": torch.cat([loss.new_zeros(1), (ratio - 1).abs().flatten()]).max(),
                      "kl_old": masked_mean(-log_ratio, mask)}

def value_loss(values, old_values, returns, loss_mask, clip=None, weights=None):
    """Half the squared error of the critic over sampled tokens (PPO); all (B, T).

        loss = 1/2 sum w max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)     clip=None: the first alone

    RAGEN clips at 0.5, which throttles it where returns reach 11 (Sokoban). Returns loss, {value_clip_frac}.
    >>> one = torch.ones(1, 1)
    >>> [value_loss(one * 3, one * 0, one * 4, one, clip)[0].item() for clip in (None, 1)]
    [0.5, 4.5]
    """
    mask = loss_mask.bool()
    weights = loss_weights(mask) if weights is None else torch.where(mask, weights, 0)
    values, returns = torch.where(mask, values, 0), torch.where(mask, returns, 0)
    error = clipped_error = (values - returns) ** 2
    if clip is not None:
        change = torch.where(mask, values - old_values, 0)
        clipped_error = (values - change + change.clamp(-clip, clip) - returns) ** 2
    loss = 0.5 * (weights * torch.maximum(error, clipped_error)).sum()
    return loss, {"value_clip_frac": masked_mean(clipped_error > error, mask)}

# --------------------------------------------------------------------------------------------------- update
def over_ranks(x):
    """[x of rank 0, x of rank 1, ...], pickled among the ranks of a torchrun; [x] in a single process."""
    found = [x] * my_rank()[1]
    if len(found) > 1:
        distributed.all_gather_object(found, x)
    return found

def my_rank():
    """(rank, number of ranks); (0, 1) in a single process."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)

def minibatches(tokens, loss_mask, group_ids, epochs, size, tokens_per_micro_batch, token_mean, seed):
    """Each epoch: rows with sampled tokens, shuffled, in ceil(n / size) nearly equal parts. On the CPU.

    Yields a minibatch's loss weights (B, T), and its micro-batches: (n,) rows that fill a packed row of
    tokens_per_micro_batch positions (or one trajectory); small enough for every rank to have some."""
    rows, generator = loss_mask.any(dim=1).nonzero()[:, 0], torch.Generator().manual_seed(seed)
    for _ in range(epochs if len(rows) else 0):
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        for chosen in shuffled.tensor_split(math.ceil(len(rows) / size)):
            inside = torch.isin(torch.arange(len(tokens)), chosen)[:, None]
            share = int(loss_mask[chosen].cumsum(1).argmax(1).sum()) // my_rank()[1]         # of positions
            part = pack(tokens[chosen], loss_mask[chosen], group_ids[chosen],
                        min(tokens_per_micro_batch, share))[1]
            yield loss_weights(loss_mask & inside, token_mean), [chosen[part == i] for i in part.unique()]

def step_or_skip(optimizer, max_grad_norm=1.0):
    """Sum the gradient over ranks, clip it, and step if its norm is finite. Gradients are dropped either way.
    Returns the norm before clipping and whether it stepped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if my_rank()[1] > 1:                                              # one all-reduce of all gradients
        gradient = torch.cat([(p.detach() * 0 if p.grad is None else p.grad).flatten() for p in parameters])
        distributed.all_reduce(gradient)
        for p, summed in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.grad = summed.view_as(p)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    stepped = bool(grad_norm.isfinite())                              # the host synchronisation of a step
    if stepped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, stepped

def summary(log, who=""):
    """log: (gradient norm, stepped, sampled tokens, sums over tokens by name) of each minibatch -> means over
    the tokens of the steps taken (left out if none was), and counts; the norm and counts under who + name."""
    shares = over_ranks([{name: float(x) for name, x in sums.items()} for *_, sums in log])
    taken = [entry[:3] + parts for entry, parts in zip(log, zip(*shares)) if entry[1]]
    total, means = sum(count for _, _, count, *_ in taken), defaultdict(float)
    for norm, _, count, *parts in taken:
        for sums in (*parts, {who + "grad_norm": float(norm) * count}):
            for name, x in sums.items():
                means[name] += x / total
    return dict(means) | {who + "grad_norm_max": max((float(norm) for norm, *_ in taken), default=0.0),
                          who + "optimizer_steps": len(taken), who + "skipped_steps": len(log) - len(taken),
                          who + "tokens_trained": total}

def explained_variance(values, returns, loss_mask):
    """1 - Var(returns - values) / Var(returns) over sampled tokens: 1 perfect, 0 constant (or undefined)."""
    mask = loss_mask.bool()
    returns, error = returns[mask].double(), (returns - values)[mask].double()
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float(error.var(correction=0)) / spread if spread > 1e-12 else 0.0

def update(policy, optimizer, batch, advantages, *, ref_logprobs=None, critic=None, critic_optimizer=None,
           old_values=None, returns=None, epochs=1, minibatch_size=32, tokens_per_micro_batch=2048,
           clip_ratio_low=0.2, clip_ratio_high=0.28, value_clip=None, kl_coef=0.0, kl_in_loss=False,
           entropy_coef=0.0, token_mean=False, temperature=1.0, vocab_size=None, max_grad_norm=1.0,
           shuffle_seed=0, supervised=False):
    """One iteration of StarPO on the kept trajectories: one step a minibatch, of policy and (if any) critic.

    batch: anything with tokens, loss_mask, logprobs (B, T), group_ids (B,). advantages, ref_logprobs, values,
    returns: (B, T). kl_in_loss adds kl_coef * (logp - logp_ref)^2 / 2 (k2, for GRPO). supervised: ratio 1.
    Returns summary's dict, nll (nats a token), kl_ref (k3), explained_variance of old_values, ratio_max_dev
    (more than rounding is a bug). With nothing sampled, one step counts as skipped."""
    device, (rank, ranks) = next(policy.parameters()).device, my_rank()
    ids, masks, group_ids = batch.tokens.cpu(), batch.loss_mask.bool().cpu(), batch.group_ids.cpu()
    log, critic_log, deviations = [], [], [0.0]
    for weights, parts in minibatches(ids, masks, group_ids, epochs, minibatch_size, tokens_per_micro_batch,
                                      token_mean, shuffle_seed):
        count, seen, critic_seen = int(masks[torch.cat(parts)].sum()), defaultdict(float), defaultdict(float)
        for part in parts[rank::ranks]:
            tokens, mask, w, old, advantage, ref, old_value, target = (
                x if x is None else x.detach()[part.to(x.device)].to(device) for x in (
                    ids, masks, weights, batch.logprobs, advantages, ref_logprobs, old_values, returns))
            logprobs, entropy = token_logprobs(policy, tokens, mask, group_ids[part], temperature,
                                               entropy_coef != 0, vocab_size)
            old = logprobs.detach() if supervised else old
            loss, stats = policy_loss(logprobs, old, advantage, mask, clip_ratio_low, clip_ratio_high, w)
            stats["nll"] = masked_mean(-logprobs.detach(), mask)
            seen["policy_loss"] += loss.detach() * count               # micro-batches add up to the minibatch
            deviations += [] if log else [float(stats["ratio_max_dev"])]         # before any step
            if entropy_coef:
                loss = loss - entropy_coef * (w * entropy).sum()
            if ref is not None:
                log_ratio = torch.where(mask, ref, 0) - logprobs
                stats["kl_ref"] = masked_mean((log_ratio.exp() - 1 - log_ratio).detach(), mask)         # k3
                loss = loss + kl_coef * (w * log_ratio ** 2 / 2).sum() if kl_in_loss else loss          # k2
            loss.backward()
            for name, mean in stats.items():
                seen[name] += mean * int(masks[part].sum())
            if critic is not None:
                values = token_values(critic, tokens, mask, group_ids[part])
                error, _ = value_loss(values, old_value, target, mask, value_clip, w)
                error.backward()
                critic_seen["value_loss"] += error.detach() * count
        log.append((*step_or_skip(optimizer, max_grad_norm), count, seen))
        if critic is not None:
            critic_log.append((*step_or_skip(critic_optimizer, max_grad_norm), count, critic_seen))
    deviations = torch.tensor(sum(over_ranks(deviations), [])).nan_to_num(1e9, 1e9)
    metrics = summary(log) | {"ratio_max_dev": float(deviations.max())}
    metrics["skipped_steps"] += not log
    if critic is not None:
        metrics |= summary(critic_log, "critic_")
        metrics["explained_variance"] = explained_variance(old_values.detach().cpu(), returns.cpu(), masks)
    return metrics

# -------------------------------------------------------------------------------------- collapse indicators
def indicators(traj, rewards):
    """What to watch for collapse, over all rows before the filter, as floats (README has a table of them)."""
    index, size, _, std, equal = group_stats(rewards, traj.group_ids)
    turns = [turn for info in traj.infos for turn in info["turns"]]
    first = {(g, turn["reply"]) for g, info in zip(index.tolist(), traj.infos) for turn in info["turns"][:1]}
    solved = torch.zeros_like(std).index_add(0, index, traj.success.cpu().double()) > 0
    distinct = torch.tensor([sum(g == group for g, _ in first) for group in range(len(size))]) / size
    templates = Counter("".join(filter(str.isalpha, turn["thought"])) for turn in turns if turn["thought"])
    sampled, n = float(traj.loss_mask.sum()), max(1, len(turns))
    means = {"success": traj.success, "reward_mean": rewards, "reward_std_in_group": std,
             "zero_var_frac": equal, "context_cut_frac": traj.context_cut, "pass_at_g": solved,
             "distinct_reply_frac": distinct, "entropy": masked_mean(traj.entropies, traj.loss_mask)}
    return {name: float(x.double().mean()) for name, x in means.items()} | {
        "tokens": sampled, "reply_len": sampled / n,
        "repeated_thought_frac": max(templates.values(), default=0) / n,
        "thought_len": sum(len(turn["thought"].split()) for turn in turns) / n,
        "valid_frac": sum(turn["valid"] for turn in turns) / n,
        "actions_per_episode": sum(len(turn["actions"]) for turn in turns) / max(1, len(traj.infos))}

if __name__ == "__main__":
    __import__("rollout").toy_batch()       # two groups of two trajectories through every formula
