"""starpo.py: every estimator against literal numbers and an independent slow loop, signs, where gradient may
reach, and what must change nothing: padding, garbage in masked slots, row order, micro-batches, packing."""
import copy
import doctest
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import rollout
import starpo
from starpo import (
    bilevel_gae, compute_advantages, episode_rewards, explained_variance, filter_groups, gae, grpo_advantages,
    indicators, loss_weights, masked_mean, pack, place_rewards, policy_loss, step_or_skip, token_logprobs,
    token_values, update, value_loss, whiten)

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf
VOCAB = 60


# --------------------------------------------------------------------------------------- fixtures and loops

def tensor(*rows):
    return torch.tensor(rows)


def micro_llama(seed=0, tied=True):
    torch.manual_seed(seed)
    config = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **config)).eval()


def micro_gpt2():
    """Absolute positions, and dropout that shows if anyone forgets eval mode: left in train mode."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=80,
                                      resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, initializer_range=0.15,
                                      bos_token_id=0, eos_token_id=0)).train()


def dialogues(seed=0, groups=3, size=4, prompt=7, turns=3):
    """Random multi-turn rows: members share the prompt, replies and observations have random lengths."""
    g = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    rows = []
    for group in range(groups):
        start = torch.randint(VOCAB, (prompt + group,), generator=g).tolist()
        for _ in range(size):
            ids, mask, turn_ids = list(start), [0] * len(start), [0] * len(start)
            for turn in range(draw(1, turns)):
                for sampled, n in ((0, draw(1, 3) if turn else 0), (1, draw(1, 5))):
                    ids += torch.randint(VOCAB, (n,), generator=g).tolist()
                    mask += [sampled] * n
                    turn_ids += [turn] * n
            rows.append((ids, mask, turn_ids, group))
    T = max(len(ids) for ids, *_ in rows)
    batch = SimpleNamespace(
        tokens=torch.tensor([ids + [0] * (T - len(ids)) for ids, *_ in rows]),
        loss_mask=torch.tensor([mask + [0] * (T - len(mask)) for _, mask, *_ in rows]).bool(),
        turn_ids=torch.tensor([turn + [-1] * (T - len(turn)) for _, _, turn, _ in rows]),
        group_ids=torch.tensor([group for *_, group in rows]))
    batch.rewards = torch.randn(len(rows), turns, generator=g)
    for k in range(turns):
        batch.rewards[:, k] *= (batch.turn_ids == k).any(dim=1)
    batch.penalties = torch.zeros_like(batch.rewards)
    return batch


def take(batch, rows):
    return SimpleNamespace(**{name: x[rows] for name, x in vars(batch).items()})


def slow_logprobs(model, tokens, loss_mask, temperature=1.0, vocab_size=VOCAB):
    """One row at a time, no packing, no padding, no mask."""
    model.eval()
    out, entropy = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
    with torch.no_grad():
        for b in range(len(tokens)):
            for t in loss_mask[b].nonzero()[:, 0].tolist():
                logits = model(tokens[b:b + 1, :t]).logits[0, -1, :vocab_size].double() / temperature
                log_p = logits - logits.exp().sum().log()
                out[b, t], entropy[b, t] = log_p[tokens[b, t]], -(log_p.exp() * log_p).sum()
    return out, entropy


def slow_gae(rewards, values, mask, gamma, lam):
    """Sum of discounted deltas over the compacted sampled tokens, by the definition."""
    advantages = torch.zeros(rewards.shape, dtype=torch.double)
    for b in range(len(rewards)):
        at = mask[b].nonzero()[:, 0].tolist()
        r, v = [float(rewards[b, t]) for t in at], [float(values[b, t]) for t in at] + [0.0]
        for i in range(len(at)):
            advantages[b, at[i]] = sum((gamma * lam) ** (j - i) * (r[j] + gamma * v[j + 1] - v[j])
                                       for j in range(i, len(at)))
    return advantages.float()


def slow_bilevel(turn_rewards, values, mask, turn_ids, gamma_turn, lam_turn, gamma, lam):
    advantages = torch.zeros(values.shape, dtype=torch.double)
    for b in range(len(values)):
        spans = [(float(turn_rewards[b, k]), ((turn_ids[b] == k) & mask[b]).nonzero()[:, 0].tolist())
                 for k in range(turn_rewards.shape[1])]
        spans = [(r, at) for r, at in spans if at]
        next_value = next_advantage = 0.0
        for r, at in reversed(spans):
            first = float(values[b, at[0]])
            advantage = r + gamma_turn * next_value - first + gamma_turn * lam_turn * next_advantage
            run, v_next, reward = 0.0, 0.0, advantage + first
            for t in reversed(at):
                run = reward + gamma * v_next - float(values[b, t]) + gamma * lam * run
                advantages[b, t], v_next, reward = run, float(values[b, t]), 0.0
            next_value, next_advantage = first, advantage
    return advantages.float()


def spoil(x, mask, seed=0):
    """x with NaN, inf and large numbers where mask is False."""
    g = torch.Generator().manual_seed(seed)
    junk = torch.tensor([NAN, INF, -INF, 1e30, -7.0])[torch.randint(5, x.shape, generator=g)]
    return torch.where(mask, x, junk)


def close(a, b, tol=1e-5):
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    assert (a - b).abs().max() <= tol, (a, b)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------- rewards, filter, groups

def test_masked_mean():
    assert masked_mean(tensor(1.0, NAN, 3.0), tensor(True, False, True)) == 2
    assert masked_mean(tensor(NAN, INF), tensor(False, False)) == 0
    x = tensor(1.0, NAN, 3.0).requires_grad_()
    masked_mean(x, tensor(1, 0, 1)).backward()
    assert x.grad.tolist() == [0.5, 0, 0.5]


def test_episode_rewards():
    R = episode_rewards(tensor([1.0, -0.5], [0.0, 0.0]), tensor([-0.1, 0.0], [0.0, -0.2]))
    close(R, tensor(0.4, -0.2))


def slow_filter(rewards, group_ids, keep):
    ids = sorted(set(group_ids.tolist()))
    stats = {i: rewards[group_ids == i].double() for i in ids}
    std = {i: float(x.std(correction=0)) for i, x in stats.items()}
    best = sorted(ids, key=lambda i: (-round(std[i], 9), i))[:max(1, math.floor(keep * len(ids) + 1e-9))]
    best = [i for i in best if keep == 1 or std[i] > 1e-6 * (1 + abs(float(stats[i].mean())))]
    return torch.tensor([i in best for i in group_ids.tolist()])


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 0.99, 1.0])
def test_filter_against_a_slow_loop(keep):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(-3, 4, (24,), generator=g) * 5
        rewards = torch.randn(24, generator=g)
        rewards = rewards.round() if seed % 2 else rewards
        assert filter_groups(rewards, ids, keep).tolist() == slow_filter(rewards, ids, keep).tolist()


def test_filter_edges():
    ids = torch.arange(8) // 2
    rewards = tensor(0.0, 1.0, 0.0, 5.0, 3.0, 3.0, 0.0, 1.0)
    assert filter_groups(rewards, ids, 0.25).tolist() == [False] * 2 + [True] * 2 + [False] * 4
    assert filter_groups(rewards, ids, 0.5).tolist() == [True] * 4 + [False] * 4  # tie: the smaller id
    assert filter_groups(rewards, -ids, 0.5).tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    assert filter_groups(rewards, ids, 0.99).tolist() == [True] * 4 + [False] * 2 + [True] * 2
    assert filter_groups(rewards, ids, 1.0).all()
    assert filter_groups(rewards, ids, 1e-9).sum() == 2  # at least one group
    equal = torch.full((8,), 0.1 + 0.2)
    assert not filter_groups(equal, ids, 0.25).any() and filter_groups(equal, ids, 1.0).all()
    assert not filter_groups(rewards, torch.arange(8), 0.5).any()  # groups of one
    assert filter_groups(torch.rand(200), torch.arange(200) // 2, 0.29).sum() == 58  # 0.29 * 100 is 28.999...
    assert filter_groups(torch.rand(30), torch.arange(30) // 3, 0.3).sum() == 9  # floor(0.3 * 10) is 3
    assert filter_groups(torch.zeros(0), torch.zeros(0).long(), 0.25).shape == (0,)
    nan = filter_groups(tensor(NAN, 1.0, 0.0, 1.0), tensor(0, 0, 1, 1), 0.5)
    assert nan.tolist() == [False, False, True, True]
    for keep in (-0.1, 1.5, NAN):
        with pytest.raises(ValueError, match="keep"):
            filter_groups(rewards, ids, keep)


def test_filter_ties_are_ties_whatever_the_rounding():
    """The same rewards in another order round to another last bit; the smaller id must win all the same."""
    values, seen = [0.1, 0.2, 0.3, 0.7, 10.9, -0.4], set()
    for order in itertools.islice(itertools.permutations(values), 0, 720, 37):
        for rewards in (list(order) + values, values + list(order)):
            rewards = torch.tensor(rewards, dtype=torch.double)
            seen.add(float(starpo.group_stats(rewards, torch.zeros(12))[3]))
            assert filter_groups(rewards, torch.arange(12) // 6, 0.5)[:6].all()
    assert len(seen) > 1  # the rounding did differ


def test_group_statistics_do_not_depend_on_row_order():
    g = torch.Generator().manual_seed(0)
    rewards, ids = torch.randn(24, generator=g), torch.randint(5, (24,), generator=g)
    perm = torch.randperm(24, generator=g)
    close(grpo_advantages(rewards, ids)[perm], grpo_advantages(rewards[perm], ids[perm]), 1e-6)
    assert torch.equal(filter_groups(rewards, ids, 0.4)[perm], filter_groups(rewards[perm], ids[perm], 0.4))


def test_grpo_numbers_and_loop():
    close(grpo_advantages(tensor(1.0, 2.0, 3.0), tensor(4, 4, 4)), tensor(-1.0, 0.0, 1.0))  # unbiased std 1
    close(grpo_advantages(tensor(0, 1), tensor(0, 0)), tensor(-0.7071, 0.7071), 1e-4)  # integers too
    g = torch.Generator().manual_seed(3)
    rewards, ids = torch.randn(40, generator=g) * 5, torch.randint(6, (40,), generator=g)
    for normalize in (True, False):
        got = grpo_advantages(rewards, ids, normalize)
        for b in range(40):
            mine = rewards[ids == ids[b]]
            want = (rewards[b] - mine.mean()) / (mine.std() + 1e-6 if normalize else 1)
            assert abs(float(got[b] - want)) < 1e-4
        assert (got[rewards == rewards.max()] > 0).all() and (got[rewards == rewards.min()] < 0).all()


def test_grpo_equal_rewards_are_exactly_zero():
    for value in (0.0, 0.1, -0.3, 10.9, 1e6, 1 / 3):
        for dtype in (torch.float32, torch.float64):
            rewards = torch.full((7,), value, dtype=dtype)
            assert grpo_advantages(rewards, torch.zeros(7)).tolist() == [0.0] * 7
    rounding = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    for normalize in (True, False):
        assert grpo_advantages(rounding, torch.zeros(3), normalize).tolist() == [0.0] * 3
        assert grpo_advantages(tensor(5.0, -2.0), tensor(0, 1), normalize).tolist() == [0.0, 0.0]
    small = grpo_advantages(tensor(0.0, 1e-3), tensor(0, 0))
    assert small[1] > 0.7 > 0 > small[0]  # small differences still count


def test_whiten():
    x, mask = tensor([1.0, 5.0, NAN], [3.0, INF, 7.0]), tensor([1, 0, 0], [1, 0, 1])
    got = whiten(x, mask)
    mean, std = 11 / 3, math.sqrt(((1 - 11 / 3) ** 2 + (3 - 11 / 3) ** 2 + (7 - 11 / 3) ** 2) / 3)
    close(got, tensor([(1 - mean) / std, 0, 0], [(3 - mean) / std, 0, (7 - mean) / std]))
    assert whiten(torch.full((2, 50), 0.1), torch.ones(2, 50)).abs().max() < 1e-6  # equal numbers
    assert whiten(torch.randn(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    assert whiten(tensor([4.0, 1.0]), tensor([1, 0])).tolist() == [[0.0, 0.0]]


# -------------------------------------------------------------------------------------------- turns and GAE

def test_place_rewards():
    mask = tensor([0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0, 0])
    turns = tensor([0, 0, 0, 1, 1, 1, 1], [0, 0, -1, -1, -1, -1, -1])
    rewards = tensor([0.5, 2.0], [0.0, NAN])  # the second row has one turn only
    assert place_rewards(rewards, mask, turns).tolist() == [[0, 0, 0.5, 0, 0, 2, 0], [0] * 7]


def test_rewards_of_turns_without_sampled_tokens_are_not_lost():
    turns = tensor([0, 0, 1, 1, 2, 2, 3]).expand(4, 7)
    mask = tensor([0, 1, 0, 0, 0, 1, 0],  # turns 1 and 3 sampled nothing: paid one turn earlier
                  [0, 0, 0, 1, 0, 0, 0],  # nothing before turn 0: paid at the first turn that has tokens
                  [0, 0, 0, 0, 0, 0, 0],  # nobody to pay
                  [0, 1, 0, 1, 1, 1, 1])
    rewards = tensor([1.0, 2.0, 4.0, 8.0]).expand(4, 4)
    got = place_rewards(rewards, mask, turns)
    assert got.tolist() == [[0, 3, 0, 0, 0, 12, 0], [0, 0, 0, 15, 0, 0, 0], [0] * 7, [0, 1, 0, 2, 0, 4, 8]]
    one = bilevel_gae(rewards, torch.zeros(4, 7), mask, turns, 1, 1, 1, 1)[0]
    close(one, gae(got, torch.zeros(4, 7), mask)[0])
    assert one[0, 1] == 15


def test_gae_numbers():
    rewards, values, mask = tensor([0.0, 0.0, 1.0]), tensor([0.5, 0.6, 0.7]), torch.ones(1, 3)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    d2, d1, d0 = 1 - 0.7, 0.9 * 0.7 - 0.6, 0.9 * 0.6 - 0.5
    a1 = d1 + 0.72 * d2
    close(advantages, tensor([d0 + 0.72 * a1, a1, d2]))
    close(returns, advantages + values)
    close(gae(rewards, values, mask)[0], 1 - values)  # gamma = lam = 1: R - V


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_gae_against_slow_loops(gamma, lam):
    for seed in range(5):
        batch = dialogues(seed)
        mask, g = batch.loss_mask, torch.Generator().manual_seed(seed)
        values, rewards = torch.randn(mask.shape, generator=g), torch.randn(mask.shape, generator=g)
        advantages, returns = gae(spoil(rewards, mask), spoil(values, mask, 1), mask, gamma, lam)
        want = slow_gae(rewards, values, mask, gamma, lam)
        close(advantages, want)
        close(returns, torch.where(mask, want + values, 0))
        for gamma_turn, lam_turn in ((0.95, 1.0), (0.5, 0.7)):
            constants = (gamma_turn, lam_turn, gamma, lam)
            got, returns = bilevel_gae(batch.rewards, spoil(values, mask), mask, batch.turn_ids, *constants)
            want = slow_bilevel(batch.rewards, values, mask, batch.turn_ids, *constants)
            close(got, want)
            close(returns, torch.where(mask, want + values, 0))


def test_bilevel_at_ones_is_gae():
    batch = dialogues(7)
    values = torch.randn(batch.tokens.shape)
    bilevel = bilevel_gae(batch.rewards, values, batch.loss_mask, batch.turn_ids, 1.0, 1.0, 1.0, 1.0)
    plain = gae(place_rewards(batch.rewards, batch.loss_mask, batch.turn_ids), values, batch.loss_mask)
    close(bilevel[0], plain[0])
    close(bilevel[1], plain[1])


def test_turn_ends_come_from_turn_ids_not_from_rewards():
    """Three turns of one token, reward at the end: gamma_turn discounts twice. Turns may pay 0."""
    mask, turns = torch.ones(1, 3), tensor([0, 1, 2])
    got, _ = bilevel_gae(tensor([0.0, 0.0, 1.0]), torch.zeros(1, 3), mask, turns, gamma_turn=0.5)
    close(got, tensor([0.25, 0.5, 1.0]))
    zero, _ = bilevel_gae(torch.zeros(1, 3), torch.zeros(1, 3), mask, turns, gamma_turn=0.5)
    assert zero.tolist() == [[0.0] * 3]
    # inside a turn only gamma counts, between turns only gamma_turn
    turns = tensor([0, 0, 1, 1])
    got, _ = bilevel_gae(tensor([0.0, 1.0]), torch.zeros(1, 4), torch.ones(1, 4), turns, 0.5, 1.0, 0.9)
    close(got, tensor([0.45, 0.5, 0.9, 1.0]))


def test_inserting_observations_changes_no_advantage():
    """gamma and lam count actions: tokens the policy did not sample are stepped over."""
    batch = dialogues(2)
    mask, g = batch.loss_mask, torch.Generator().manual_seed(0)
    values = torch.randn(mask.shape, generator=g)
    for b in range(len(mask)):
        at = mask[b].nonzero()[:, 0]
        turn, value = batch.turn_ids[b, at][None], values[b, at][None]
        full = batch.rewards[b:b + 1], values[b:b + 1], mask[b:b + 1], batch.turn_ids[b:b + 1]
        ones = torch.ones(1, len(at))
        short = gae(place_rewards(full[0], ones, turn), value, ones, 0.9, 0.8)[0]
        close(gae(place_rewards(full[0], full[2], full[3]), full[1], full[2], 0.9, 0.8)[0][:, at], short)
        short = bilevel_gae(full[0], value, ones, turn, 0.9, 0.8, 0.7, 0.6)[0]
        close(bilevel_gae(*full, 0.9, 0.8, 0.7, 0.6)[0][:, at], short)


def test_truncation_and_neighbours_do_not_matter():
    """A row's advantages come from the row alone, before whitening; no bootstrap beyond its last token."""
    batch = dialogues(4)
    values = torch.randn(batch.tokens.shape)
    inputs = (batch.rewards, values, batch.loss_mask, batch.turn_ids)
    everything = bilevel_gae(*inputs, 0.9, 0.9, 0.9, 0.9)[0]
    for b in range(len(values)):
        close(everything[b:b + 1], bilevel_gae(*(x[b:b + 1] for x in inputs), 0.9, 0.9, 0.9, 0.9)[0])


def test_estimators_do_not_write_into_their_inputs():
    batch = dialogues(0)
    values = torch.randn(batch.tokens.shape)
    batch.logprobs = torch.randn(batch.tokens.shape)
    before = copy.deepcopy([*vars(batch).values(), values])
    for estimator in ("grpo", "gae", "bilevel"):
        compute_advantages(estimator, batch, values, torch.zeros_like(values), kl_coef=0.1)
    assert same_bits(before, [*vars(batch).values(), values])


def test_compute_advantages():
    batch = dialogues(5)
    batch.penalties = torch.where(batch.rewards != 0, -0.1, 0.0)
    batch.logprobs = torch.randn(batch.tokens.shape)
    ref, values = torch.randn(batch.tokens.shape), torch.randn(batch.tokens.shape)
    mask, paid = batch.loss_mask, batch.rewards + batch.penalties
    advantages, returns = compute_advantages("grpo", batch)
    per_row = grpo_advantages(episode_rewards(batch.rewards, batch.penalties), batch.group_ids)
    assert returns is None and torch.equal(advantages, torch.where(mask, per_row[:, None], 0))
    for kl_coef in (0.0, 0.3):
        kl = torch.where(mask, kl_coef * (batch.logprobs - ref), 0)
        want = gae(place_rewards(paid, mask, batch.turn_ids) - kl, values, mask, 0.9, 0.8)
        dirty = SimpleNamespace(**vars(batch) | {"logprobs": spoil(batch.logprobs, mask)})
        got = compute_advantages("gae", dirty, values, spoil(ref, mask), kl_coef=kl_coef, gamma=0.9, lam=0.8)
        close(got[0], whiten(want[0], mask))
        close(got[1], want[1])
        per_turn = paid - torch.stack([(kl * (batch.turn_ids == k)).sum(1) for k in range(paid.shape[1])], 1)
        want = bilevel_gae(per_turn, values, mask, batch.turn_ids, 0.7, 0.9)
        got = compute_advantages("bilevel", dirty, values, spoil(ref, mask), kl_coef=kl_coef, gamma_turn=0.7,
                                 lam_turn=0.9)
        close(got[0], whiten(want[0], mask))
        close(got[1], want[1])
    for estimator, given in (("ppo", values), ("gae", None)):
        with pytest.raises(ValueError, match="estimator"):
            compute_advantages(estimator, batch, given)


def test_kl_in_reward_pulls_towards_the_reference():
    """A token the policy likes more than the reference does must pay, the other is paid."""
    zeros, ref = torch.zeros(1, 2), tensor([-2.0, -2.0])
    batch = SimpleNamespace(loss_mask=zeros == 0, turn_ids=tensor([0, 1]), rewards=zeros, penalties=zeros,
                            group_ids=tensor(0), logprobs=tensor([-1.0, -3.0]))
    for estimator in ("gae", "bilevel"):
        _, returns = compute_advantages(estimator, batch, zeros, ref, kl_coef=0.5, gamma=0.0, gamma_turn=0.0)
        close(returns, tensor([-0.5, 0.5]))


# --------------------------------------------------------------------------------------------------- losses

def test_loss_weights():
    mask = tensor([1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1])
    weights = loss_weights(mask)
    close(weights[:, 0], tensor(1 / 6, 1 / 6, 0.0, 1 / 12))
    assert abs(float(weights.sum()) - 1) < 1e-6 and weights[mask == 0].abs().sum() == 0
    tokens = loss_weights(mask, token_mean=True)
    close(tokens, mask / 8)
    assert loss_weights(torch.zeros(2, 3)).sum() == 0 and loss_weights(torch.zeros(2, 3), True).sum() == 0


def test_policy_loss_numbers():
    """Ratio 1.5 and 0.5 against both signs of the advantage; bounds 0.8 and 1.28."""
    old, one = torch.zeros(1, 1), torch.ones(1, 1)
    cases = ((1.5, 1.0, 1.28, 1), (1.5, -1.0, -1.5, 0), (0.5, 1.0, 0.5, 0), (0.5, -1.0, -0.8, 1),
             (1.1, 2.0, 2.2, 0), (9.0, -1.0, -9.0, 0))  # the last one: no dual clip
    for ratio, advantage, surrogate, clipped in cases:
        loss, metrics = policy_loss(one * math.log(ratio), old, one * advantage, one)
        assert abs(float(loss) + surrogate) < 1e-5 and float(metrics["clip_frac"]) == clipped
        assert abs(float(metrics["ratio_max_dev"]) - abs(ratio - 1)) < 1e-5
        assert abs(float(metrics["kl_old"]) + math.log(ratio)) < 1e-5
    close(policy_loss(one * math.log(1.5), old, one, one, clip_ratio_high=0.1)[0], torch.tensor(-1.1))
    close(policy_loss(one * math.log(0.5), old, -one, one, clip_ratio_low=0.4)[0], torch.tensor(0.6))


def test_policy_loss_mean_over_trajectories():
    mask = tensor([1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0])
    advantages = tensor([1.0, 2.0, 3.0, 9.0], [9.0, 9.0, 9.0, 5.0], [9.0] * 4)
    zeros = torch.zeros(3, 4)
    assert float(policy_loss(zeros, zeros, advantages, mask)[0]) == pytest.approx(-(2 + 5) / 2)
    by_token = policy_loss(zeros, zeros, advantages, mask, weights=loss_weights(mask, token_mean=True))[0]
    assert float(by_token) == pytest.approx(-11 / 4)


def test_policy_loss_sign():
    """Descending the loss makes a token of positive advantage likelier, one of negative advantage less so."""
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    policy_loss(logprobs, logprobs.detach(), tensor([1.0, -1.0]), torch.ones(1, 2))[0].backward()
    assert logprobs.grad[0, 0] < 0 < logprobs.grad[0, 1]


def test_gradient_reaches_sampled_tokens_alone_and_garbage_changes_nothing():
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 9, generator=g) < 0.5
    mask[2] = False
    logprobs, old, advantages, ref = torch.randn(4, 4, 9, generator=g)
    results = []
    for dirty in (False, True):
        inputs = [spoil(x, mask) if dirty else x.clone() for x in (logprobs, old, advantages)]
        for x in inputs:
            x.requires_grad_()
        loss, metrics = policy_loss(*inputs, mask, 1.0, 1e9)  # nothing clipped: gradient everywhere
        loss.backward()
        assert ((inputs[0].grad != 0) == mask).all() and torch.isfinite(inputs[0].grad).all()
        values = spoil(ref, mask).requires_grad_() if dirty else ref.clone().requires_grad_()
        error, _ = value_loss(values, inputs[1].detach(), inputs[2].detach(), mask, clip=0.2)
        error.backward()
        assert torch.isfinite(values.grad).all() and (values.grad[~mask] == 0).all()
        results.append([loss, *metrics.values(), inputs[0].grad, error, values.grad])
    assert same_bits(*results)


def test_value_loss_numbers():
    one = torch.ones(1, 1)
    for value, old, target, clip, want in ((3, 0, 4, None, 0.5), (3, 0, 4, 1.0, 4.5), (0.5, 0, 4, 1.0, 6.125),
                                           (5, 0, 4, 1.0, 4.5), (0.5, 2, 1, 1.0, 0.125)):
        loss, metrics = value_loss(one * value, one * old, one * target, one, clip)
        assert float(loss) == pytest.approx(want)
        assert float(metrics["value_clip_frac"]) == (want == 4.5)
    mask = tensor([1, 1, 0], [0, 0, 1])
    loss, _ = value_loss(torch.zeros(2, 3), None, tensor([1.0, 3.0, 9.0], [9.0, 9.0, 2.0]), mask)
    assert float(loss) == pytest.approx(0.5 * (5 + 4) / 2)


def test_empty_masks_are_zero_and_finite():
    zeros, junk = torch.zeros(2, 3), torch.full((2, 3), NAN)
    logprobs = junk.clone().requires_grad_()
    loss, metrics = policy_loss(logprobs, junk, junk, zeros)
    loss.backward()
    assert loss == 0 and logprobs.grad.abs().sum() == 0 and all(float(x) == 0 for x in metrics.values())
    assert value_loss(junk, junk, junk, zeros, 0.5)[0] == 0
    assert gae(junk, junk, zeros)[0].abs().sum() == 0
    assert bilevel_gae(tensor([1.0], [NAN]), junk, zeros, zeros.long())[0].abs().sum() == 0
    logprobs, entropy = token_logprobs(micro_llama(), zeros.long(), zeros, with_entropy=True)
    assert logprobs.abs().sum() == 0 and entropy.abs().sum() == 0


# ------------------------------------------------------------------------------------ packing and log-probs

def spans(pieces):
    """Of each piece, the columns it fills in its row."""
    ends = list(itertools.accumulate(p.stop - p.start for p in pieces))
    return [range(end - (p.stop - p.start), end) for end, p in zip(ends, pieces)]


def test_pack_keeps_every_id_once_and_in_place():
    batch = dialogues(0)
    hints = (batch.group_ids, None, torch.zeros(12), torch.arange(12) % 2)
    for group_ids, width in itertools.product(hints, (1, 40, 1024)):
        rows, row, column = pack(batch.tokens, batch.loss_mask, group_ids, width)
        ids = [torch.cat([batch.tokens[p.member, p.start:p.stop] for p in pieces]) for pieces in rows]
        for b in range(12):
            used = int(batch.loss_mask[b].nonzero().max())
            assert torch.equal(ids[row[b]][column[b, :used]], batch.tokens[b, :used])
            own = [i for i, p in enumerate(rows[row[b]]) if p.member == b and p.stop == used]
            tail = rows[row[b]][own[-1]]
            prefix = rows[row[b]][tail.prefix]
            assert (prefix.start, prefix.stop, prefix.prefix) == (0, tail.start, tail.prefix)
            where = spans(rows[row[b]])
            assert [*where[tail.prefix], *where[own[-1]]] == column[b, :used].tolist()
        assert all(len(x) <= max(width, int(column.max()) + 1) for x in ids)
    grouped, alone = (pack(batch.tokens, batch.loss_mask, ids, 4096)[0] for ids in (batch.group_ids, None))
    prompts = sum((7 + group) * 3 for group in range(3))  # three of four prompts are not repeated
    length = [sum(len(x) for x in spans(rows[0])) for rows in (grouped, alone)]
    assert len(grouped) == len(alone) == 1 and length[1] - length[0] >= prompts


def test_pack_prefix_is_what_members_share():
    tokens = tensor([1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3, 8, 8])
    mask = tensor([0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1])

    def pieces(*args):
        (row,), _, _ = pack(*args)
        return [(p.start, p.stop, p.prefix) for p in row]

    assert pieces(tokens, mask, torch.zeros(3)) == [(0, 2, 0), (2, 4, 0), (2, 4, 0), (2, 4, 0)]
    gap = tensor([1, 2, 3, 4, 5], [1, 9, 3, 4, 5])  # a run, not a count
    assert pieces(gap, mask[:2], torch.zeros(2)) == [(0, 1, 0), (1, 4, 0), (1, 4, 0)]
    early = tensor([0, 0, 0, 0, 1], [0, 1, 0, 0, 0])
    assert pieces(tokens[[0, 0]], early, torch.zeros(2)) == [(0, 1, 0), (1, 4, 0), (1, 1, 0)]
    # the prefix ends before the first sampled token
    assert pieces(tokens[[0, 2]], mask[[0, 2]], torch.zeros(2)) == [(0, 3, 0), (3, 4, 0), (3, 4, 0)]


def test_attention_mask_in_plain_numbers():
    """[prefix, a, b] and [prefix, c c]."""
    row = [starpo.Piece(0, 0, 1, 0), starpo.Piece(0, 1, 2, 0), starpo.Piece(1, 1, 2, 0),
           starpo.Piece(2, 0, 1, 3), starpo.Piece(2, 1, 3, 3)]
    position = torch.tensor([0, 1, 1, 0, 1, 2])
    see = starpo.attention_mask(row, position, torch.float32)[0, 0] == 0
    assert see.int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0],
                                  [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    near = starpo.attention_mask(row, position, torch.float32, window=2)[0, 0] == 0  # the last token is 2 from the prefix
    assert near[5].int().tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("make", [micro_llama, micro_gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_scores_equal_one_by_one(make, temperature, monkeypatch):
    """With the hint right, wrong, reversed and absent; in one wide row, and in many narrow ones."""
    model = make()
    batch = dialogues(1)
    batch.tokens[1::4, 7] = batch.tokens[0::4, 7]  # some members share the first token after it
    want, entropy = slow_logprobs(model, batch.tokens, batch.loss_mask, temperature)
    if make is micro_gpt2:
        model.train()  # dropout on: must not matter
    right = batch.group_ids
    hints = (right, None, torch.zeros(12), torch.arange(12) % 5, -right, right.tolist())
    for group_ids, width in itertools.product(hints, (32, 1)):  # in multiples of the hidden size
        monkeypatch.setattr(starpo, "ROW_WIDTH", width)
        got, h = token_logprobs(model, batch.tokens, batch.loss_mask, group_ids, temperature, True)
        close(got, want)
        close(h, entropy)
        assert got.requires_grad and (torch.stack([got, h])[:, ~batch.loss_mask] == 0).all()


def test_members_that_part_right_after_the_prefix():
    """The first id after the prefix: sampled or not, the same for some members or not, also the only one."""
    model = micro_llama()
    tokens = tensor([5, 6, 7, 1, 2, 0], [5, 6, 7, 1, 9, 0], [5, 6, 7, 4, 0, 0], [5, 6, 7, 4, 8, 3],
                    [5, 6, 9, 4, 8, 3])
    mask = tensor([0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1],
                  [0, 0, 0, 1, 1, 1])
    for rows in ([0, 1, 2, 3, 4], [0, 2], [2], [3, 1], [2, 2, 0]):
        got, _ = token_logprobs(model, tokens[rows], mask[rows], torch.zeros(len(rows)))
        close(got, slow_logprobs(model, tokens[rows], mask[rows])[0])


def test_one_member_does_not_see_another(monkeypatch):
    """Other rows of a packed row, and ids past the last sampled one, may change without a trace."""
    model = micro_llama()
    batch = dialogues(3, groups=2)
    monkeypatch.setattr(starpo, "ROW_WIDTH", 32)
    before, _ = token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids)
    assert len(pack(batch.tokens, batch.loss_mask, batch.group_ids, 32 * 32)[0]) == 1  # one row
    for b in range(8):
        changed = batch.tokens.clone()
        first = int(batch.loss_mask[b].nonzero().min())
        changed[b, first:] = (changed[b, first:] + 1) % VOCAB
        after, _ = token_logprobs(model, changed, batch.loss_mask, batch.group_ids)
        others = torch.arange(8) != b
        close(after[others], before[others], 1e-6)
        assert (after[b] - before[b]).abs().max() > 1e-3


def test_padding_garbage_row_order_and_left_out_rows_change_nothing():
    model = micro_llama()
    batch = dialogues(6)
    want, _ = token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids)
    T = batch.tokens.shape[1]
    wide = torch.full((12, T + 9), -12345)  # not even an id: it is never read
    for b in range(12):
        n = int(batch.loss_mask[b].nonzero().max()) + 1
        wide[b, :n] = batch.tokens[b, :n]
    mask = torch.cat([batch.loss_mask, torch.zeros(12, 9).bool()], dim=1)
    close(token_logprobs(model, wide, mask, batch.group_ids)[0][:, :T], want)
    perm = torch.randperm(12)
    shuffled = take(batch, perm)
    close(token_logprobs(model, shuffled.tokens, shuffled.loss_mask, shuffled.group_ids)[0], want[perm])
    mask = batch.loss_mask.clone()
    mask[[0, 5, 6]] = False
    got, _ = token_logprobs(model, batch.tokens, mask, batch.group_ids)
    assert got[[0, 5, 6]].abs().sum() == 0
    close(got[mask], want[mask])


def test_temperature_zero_and_vocab_size():
    model = micro_llama()
    batch = dialogues(2)
    tokens, mask = batch.tokens % 50, batch.loss_mask
    at_one, entropy = token_logprobs(model, tokens, mask, temperature=1.0, with_entropy=True)
    at_zero, entropy_zero = token_logprobs(model, tokens, mask, temperature=0, with_entropy=True)
    assert torch.equal(at_one, at_zero) and torch.equal(entropy, entropy_zero)
    got, h = token_logprobs(model, tokens, mask, temperature=0.7, with_entropy=True, vocab_size=50)
    want, entropy = slow_logprobs(model, tokens, mask, 0.7, vocab_size=50)
    close(got, want)
    close(h, entropy)
    (got.sum() + h.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    with pytest.raises(ValueError, match="first id"):
        token_logprobs(model, tokens, torch.ones_like(mask))


def test_chunked_logits_give_the_same_scores_and_gradients(monkeypatch):
    batch, results = dialogues(0), []
    for elements in (starpo.LOGITS_ELEMENTS, VOCAB * 7):
        monkeypatch.setattr(starpo, "LOGITS_ELEMENTS", elements)
        monkeypatch.setattr(starpo, "ROW_WIDTH", elements // 4)
        model = micro_llama()
        logprobs, entropy = token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids, 0.8, True)
        (logprobs.sum() - entropy.sum()).backward()
        results.append([logprobs, entropy, *(p.grad for p in model.parameters())])
    for a, b in zip(*results):
        close(a, b, 1e-4)


def test_models_with_sliding_windows_and_scaled_logits():
    """Gemma mixes window and full layers and caps its logits, Mistral has windows alone, Granite divides."""
    from transformers import (Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM,
                              MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM)
    size = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15,
                pad_token_id=0, bos_token_id=0, eos_token_id=0)
    batch = dialogues(8)
    models = [Gemma2ForCausalLM(Gemma2Config(**size, head_dim=8, sliding_window=4,
                                             final_logit_softcapping=3.0)),
              MistralForCausalLM(MistralConfig(**size, sliding_window=4)),
              GraniteForCausalLM(GraniteConfig(**size, logits_scaling=4.0)),
              Qwen2ForCausalLM(Qwen2Config(**size, use_sliding_window=True, sliding_window=4,
                                           max_window_layers=1))]
    for model in models:
        want, _ = slow_logprobs(model, batch.tokens, batch.loss_mask)
        close(token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids)[0], want)


def test_autocast_scores_in_float32():
    """bfloat16 matrices, float32 softmax: near the float32 scores, with a gradient for float32 weights."""
    model, batch = micro_llama(), dialogues(0)
    want, _ = slow_logprobs(model, batch.tokens, batch.loss_mask)
    with torch.autocast("cpu", torch.bfloat16):
        got, entropy = token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids, 1.0, True)
        got.sum().backward()
    assert got.dtype == entropy.dtype == torch.float32 and 0 < (got - want).abs().max() < 0.1
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    half = micro_llama().to(torch.bfloat16)
    assert (token_logprobs(half, batch.tokens, batch.loss_mask, batch.group_ids)[0] - want).abs().max() < 0.2


def test_ratio_is_one_before_the_first_step():
    for model in (micro_llama(), micro_gpt2()):
        batch = dialogues(9)
        old, _ = slow_logprobs(model, batch.tokens, batch.loss_mask, 0.7)
        new, _ = token_logprobs(model, batch.tokens, batch.loss_mask, batch.group_ids, 0.7)
        _, metrics = policy_loss(new, old, torch.randn(old.shape), batch.loss_mask)
        assert metrics["ratio_max_dev"] < 1e-5 and metrics["clip_frac"] == 0


def test_observations_are_context_and_never_targets():
    """Ids that only observations contain get from the head's gradient what the softmax at sampled tokens
    gives them, and nothing as a target."""
    model = micro_llama(tied=False)
    batch = dialogues(0)
    tokens, mask = batch.tokens.clone(), batch.loss_mask
    tokens[~mask], tokens[mask] = 50 + tokens[~mask] % 10, tokens[mask] % 50
    logprobs, _ = token_logprobs(model, tokens, mask, batch.group_ids)
    policy_loss(logprobs, logprobs.detach(), torch.ones(logprobs.shape), mask)[0].backward()
    with torch.no_grad():
        hidden, b, t = starpo.hidden_of_sampled(model.base_model, tokens, mask, batch.group_ids)
        softmax_part = (model.lm_head(hidden).softmax(dim=-1) * loss_weights(mask)[b, t][:, None]).T @ hidden
    close(model.lm_head.weight.grad[50:], softmax_part[50:])
    assert (model.lm_head.weight.grad[:50] - softmax_part[:50]).abs().max() > 1e-2


def test_token_values():
    model = micro_llama(3)
    critic = SimpleNamespace(backbone=model.base_model, head=torch.nn.Linear(32, 1))
    batch = dialogues(1)
    got = token_values(critic, batch.tokens, batch.loss_mask, batch.group_ids).detach()
    for b in range(12):
        hidden = model.base_model(batch.tokens[b:b + 1]).last_hidden_state[0]
        for t in range(1, batch.tokens.shape[1]):  # read off position t - 1
            want = critic.head(hidden[t - 1]).item() if batch.loss_mask[b, t] else 0.0
            assert abs(float(got[b, t]) - want) < 1e-5
    critic.head.weight.data.zero_(), critic.head.bias.data.zero_()
    assert token_values(critic, batch.tokens, batch.loss_mask).abs().sum() == 0


# --------------------------------------------------------------------------------------------------- update

def trained(batch, advantages, steps=1, model=None, optimizer=torch.optim.SGD, lr=0.1, **options):
    model = model or micro_llama()
    optimizer = optimizer(model.parameters(), lr=lr)
    for _ in range(steps):
        metrics = update(model, optimizer, batch, advantages, **options)
    return model, metrics


def scored(seed=0, model=None, **options):
    """A batch with the log-probs that micro_llama gives it, and random advantages."""
    batch = dialogues(seed, **options)
    batch.logprobs = slow_logprobs(model or micro_llama(), batch.tokens, batch.loss_mask)[0]
    return batch, torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(seed))


def parameters_close(a, b, tol=2e-6):
    for x, y in zip(a.parameters(), b.parameters()):
        assert (x - y).abs().max() <= tol


def test_update_moves_the_right_way():
    """The better member's reply becomes likelier, the worse one's less likely."""
    batch, _ = scored(0)
    R = torch.arange(12).float() % 4
    batch.rewards, batch.penalties = R[:, None], torch.zeros(12, 1)
    advantages, _ = compute_advantages("grpo", batch)
    model, metrics = trained(batch, advantages, lr=0.02)
    change = token_logprobs(model, batch.tokens, batch.loss_mask)[0] - batch.logprobs
    assert change[R == 3].sum() > 0 > change[R == 0].sum()
    assert metrics["optimizer_steps"] == 1 and metrics["ratio_max_dev"] < 1e-5
    assert abs(metrics["policy_loss"]) < 1e-4


@pytest.mark.parametrize("token_mean", [False, True])
def test_micro_batches_rows_and_hints_do_not_matter(token_mean):
    batch, advantages = scored(1)
    batch.loss_mask[3] = False  # a row without sampled tokens
    ref = batch.logprobs + 0.3 * torch.randn(batch.logprobs.shape)
    options = dict(token_mean=token_mean, ref_logprobs=ref, kl_coef=0.1, kl_in_loss=True, entropy_coef=0.01)
    model, metrics = trained(batch, advantages, tokens_per_micro_batch=10**6, **options)
    for budget in (1, 30, 64, 100):
        other, numbers = trained(batch, advantages, tokens_per_micro_batch=budget, **options)
        parameters_close(model, other)
        assert numbers == pytest.approx(metrics, abs=1e-5)
    rows = torch.arange(12) != 3
    other, numbers = trained(take(batch, rows), advantages[rows], **options | {"ref_logprobs": ref[rows]})
    parameters_close(model, other)
    perm = torch.randperm(12)
    other, _ = trained(take(batch, perm), advantages[perm], **options | {"ref_logprobs": ref[perm]})
    parameters_close(model, other)
    batch.group_ids = torch.arange(12)
    other, _ = trained(batch, advantages, **options)
    parameters_close(model, other)


def test_update_is_the_equations():
    """One SGD step, and its metrics, against the loss written out with plain one-row forward passes."""
    batch, advantages = scored(2)
    batch.tokens = batch.tokens % 55
    old = slow_logprobs(micro_llama(), batch.tokens, batch.loss_mask, 0.9, 55)[0]
    old = batch.logprobs = old + 0.4 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    ref = batch.logprobs - 0.2
    got, metrics = trained(batch, advantages, lr=0.1, ref_logprobs=ref, kl_coef=0.5, kl_in_loss=True,
                           entropy_coef=0.1, temperature=0.9, vocab_size=55, clip_ratio_low=0.1,
                           clip_ratio_high=0.3, max_grad_norm=None)
    model, loss, policy = micro_llama(), 0.0, 0.0
    sums, n = {"clip_frac": 0, "kl_ref": 0.0, "kl_old": 0.0}, int(batch.loss_mask.sum())
    for b in range(12):
        log_p = (model(batch.tokens[b:b + 1]).logits[0, :, :55] / 0.9).log_softmax(-1)
        for t in batch.loss_mask[b].nonzero()[:, 0].tolist():
            logp, w = log_p[t - 1, batch.tokens[b, t]], 1 / int(batch.loss_mask[b].sum()) / 12
            ratio, a = (logp - old[b, t]).exp(), advantages[b, t]
            surrogate = min(ratio * a, ratio.clamp(0.9, 1.3) * a)
            entropy = -(log_p[t - 1].exp() * log_p[t - 1]).sum()
            loss = loss + w * (-surrogate + 0.5 * (logp - ref[b, t]) ** 2 / 2 - 0.1 * entropy)
            policy -= w * float(surrogate.detach())
            sums["clip_frac"] += int(surrogate < ratio * a)
            sums["kl_old"] += float((old[b, t] - logp).detach())
            sums["kl_ref"] += float(((ref[b, t] - logp).exp() - 1 - (ref[b, t] - logp)).detach())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), INF)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    parameters_close(got, model, 1e-5)
    for name, value in sums.items():
        assert metrics[name] == pytest.approx(value / n, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["grad_norm_max"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["policy_loss"] == pytest.approx(policy, abs=1e-5) and sums["clip_frac"] > 0
    assert metrics["tokens_trained"] == n and metrics["ratio_max_dev"] > 0.3


def test_supervised_update_is_the_weighted_likelihood():
    """The same path as the policy gradient: nobody sampled these ids, so old log-probs do not count."""
    batch, _ = scored(4)
    batch.logprobs = torch.zeros_like(batch.logprobs)
    got, metrics = trained(batch, torch.ones(batch.tokens.shape), supervised=True, max_grad_norm=None)
    model = micro_llama()
    logprobs, _ = token_logprobs(model, batch.tokens, batch.loss_mask)
    loss = -(loss_weights(batch.loss_mask) * logprobs).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    parameters_close(got, model)
    assert metrics["nll"] == pytest.approx(-masked_mean(logprobs, batch.loss_mask).item(), abs=1e-5)
    assert metrics["clip_frac"] == metrics["ratio_max_dev"] == 0


def test_kl_in_loss_pulls_towards_the_reference_and_entropy_flattens():
    batch, _ = scored(0)
    zeros = torch.zeros(batch.tokens.shape)
    for shift in (0.5, -0.5):
        options = dict(lr=0.01, ref_logprobs=batch.logprobs + shift, kl_coef=1.0)
        model, metrics = trained(batch, zeros, kl_in_loss=True, **options)
        after, _ = token_logprobs(model, batch.tokens, batch.loss_mask)
        assert ((after - batch.logprobs)[batch.loss_mask].mean() > 0) == (shift > 0)
        assert metrics["kl_ref"] == pytest.approx(math.exp(shift) - 1 - shift, abs=1e-4)
        same, _ = trained(batch, zeros, **options)  # logged only
        assert same_bits(same.parameters(), micro_llama().parameters())
    before = slow_logprobs(micro_llama(), batch.tokens, batch.loss_mask)[1].sum()
    model, _ = trained(batch, zeros, lr=0.01, entropy_coef=1.0)
    assert slow_logprobs(model, batch.tokens, batch.loss_mask)[1].sum() > before


def test_minibatches_are_shuffled_and_nearly_equal():
    batch, advantages = scored(0)
    masks = batch.loss_mask.clone()
    masks[4] = False

    def split(size, seed, epochs=1):
        rows = (batch.tokens, masks, batch.group_ids)
        plan = list(starpo.minibatches(*rows, epochs, size, 64, False, seed))
        for weights, parts in plan:
            assert abs(float(weights.sum()) - 1) < 1e-6
            assert sorted(torch.cat(parts).tolist()) == weights.sum(1).nonzero()[:, 0].tolist()
        return [sorted(torch.cat(parts).tolist()) for _, parts in plan]

    assert sorted(map(len, split(4, 0))) == [3, 4, 4] and len(split(11, 0)) == 1 and len(split(1, 0)) == 11
    assert sorted(sum(split(4, 0), [])) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert split(4, 0) == split(4, 0) != split(4, 1) and split(4, 0, 2)[3:] != split(4, 0)
    state = torch.get_rng_state()
    _, metrics = trained(batch, advantages, minibatch_size=5, epochs=2)
    assert torch.equal(state, torch.get_rng_state())  # global random state is left alone
    assert metrics["optimizer_steps"] == 6 and metrics["tokens_trained"] == 2 * int(batch.loss_mask.sum())
    assert metrics["ratio_max_dev"] < 1e-5 < abs(metrics["kl_old"])  # the former is before the first step


def test_update_ignores_garbage_in_masked_slots_and_writes_to_no_input():
    batch, advantages = scored(3)
    mask, ref = batch.loss_mask, batch.logprobs - 0.1
    clean, numbers = trained(batch, advantages, ref_logprobs=ref, kl_coef=0.1, kl_in_loss=True)
    dirty = SimpleNamespace(**vars(batch) | {"logprobs": spoil(batch.logprobs, mask)})
    inputs = [dirty.logprobs, spoil(advantages, mask, 1), spoil(ref, mask, 2)]
    before = copy.deepcopy(inputs)
    other, same = trained(dirty, inputs[1], ref_logprobs=inputs[2], kl_coef=0.1, kl_in_loss=True)
    parameters_close(clean, other, 0)
    assert numbers == same
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, inputs))


def frozen(model, optimizer):
    state = [x for per_parameter in optimizer.state.values() for x in per_parameter.values()]
    return copy.deepcopy([*model.state_dict().values(), *state])


def test_firewall_leaves_weights_and_optimiser_state_bit_equal():
    batch, advantages = scored(0)
    model = micro_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update(model, optimizer, batch, advantages)
    before = frozen(model, optimizer)
    for bad in (NAN, INF, -INF):
        poisoned = advantages.clone()
        poisoned[2, int(batch.loss_mask[2].nonzero()[0])] = bad
        metrics = update(model, optimizer, batch, poisoned)
        assert metrics["skipped_steps"] == 1 and metrics["optimizer_steps"] == 0
        assert same_bits(before, frozen(model, optimizer)) and all(p.grad is None for p in model.parameters())
        assert all(math.isfinite(value) for value in metrics.values())
    for shift in (200, NAN):  # a ratio of e^200, and none
        broken = SimpleNamespace(**vars(batch) | {"logprobs": batch.logprobs - shift})
        metrics = update(model, optimizer, broken, advantages)
        assert metrics["skipped_steps"] == 1 and metrics["ratio_max_dev"] == 1e9
    nothing = SimpleNamespace(**vars(batch) | {"loss_mask": torch.zeros_like(batch.loss_mask)})
    metrics = update(model, optimizer, nothing, advantages)
    assert metrics["skipped_steps"] == 1 and metrics["optimizer_steps"] == metrics["tokens_trained"] == 0
    assert same_bits(before, frozen(model, optimizer))
    # of two minibatches only the poisoned one is skipped, and it does not enter the means
    poisoned = advantages.clone()
    poisoned[2, int(batch.loss_mask[2].nonzero()[0])] = NAN
    metrics = update(model, optimizer, batch, poisoned, minibatch_size=6)
    assert metrics["skipped_steps"] == metrics["optimizer_steps"] == 1
    assert math.isfinite(metrics["policy_loss"])
    assert not same_bits(before, frozen(model, optimizer))


def test_step_or_skip():
    p = torch.nn.Parameter(tensor(3.0, 4.0))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = tensor(3.0, 4.0)
    norm, stepped = step_or_skip(optimizer, 1.0)
    assert stepped and norm == 5 and p.grad is None
    close(p.data, tensor(2.4, 3.2))
    p.grad = tensor(3.0, 4.0)
    step_or_skip(optimizer, None)  # no clipping
    close(p.data, tensor(-0.6, -0.8))
    p.grad = tensor(NAN, 0.0)
    norm, stepped = step_or_skip(optimizer)
    assert not stepped and p.grad is None
    close(p.data, tensor(-0.6, -0.8))


def test_update_trains_the_critic():
    batch, _ = scored(0)
    policy = micro_llama(5)
    critic = torch.nn.Module()
    critic.backbone, critic.head = micro_llama(6).base_model, torch.nn.Linear(32, 1)
    torch.nn.init.zeros_(critic.head.weight), torch.nn.init.zeros_(critic.head.bias)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=lr) for x, lr in ((policy, 1e-4), (critic, 3e-3))]
    batch.rewards = batch.group_ids[:, None] * torch.ones(1, 3) * (batch.rewards != 0)
    batch.logprobs = token_logprobs(policy, batch.tokens, batch.loss_mask)[0].detach()
    values = token_values(critic, batch.tokens, batch.loss_mask)
    advantages, returns = compute_advantages("gae", batch, values)
    still = [torch.optim.SGD(x.parameters(), lr=0.0) for x in (policy, critic)]
    losses = [update(policy, still[0], batch, advantages, critic=critic, critic_optimizer=still[1],
                     old_values=values, returns=returns, tokens_per_micro_batch=n) for n in (30, 10**6)]
    assert losses[0]["value_loss"] == pytest.approx(losses[1]["value_loss"])
    assert losses[0]["critic_grad_norm"] == pytest.approx(losses[1]["critic_grad_norm"], rel=1e-4)
    history = []
    for _ in range(25):
        values = token_values(critic, batch.tokens, batch.loss_mask, batch.group_ids)
        advantages, returns = compute_advantages("gae", batch, values)
        history.append(update(policy, optimizers[0], batch, advantages, critic=critic, old_values=values,
                              critic_optimizer=optimizers[1], returns=returns, value_clip=5.0,
                              minibatch_size=6))
    first, last = history[0], history[-1]
    at_zero = 0.5 * float((loss_weights(batch.loss_mask) * returns ** 2).sum())
    assert first["explained_variance"] == 0 and first["critic_optimizer_steps"] == 2
    assert last["explained_variance"] > 0.5 and last["value_loss"] < 0.5 * first["value_loss"] < at_zero
    before = frozen(critic, optimizers[1])
    returns[0, int(batch.loss_mask[0].nonzero()[0])] = NAN
    metrics = update(policy, optimizers[0], batch, advantages, critic=critic, critic_optimizer=optimizers[1],
                     old_values=values, returns=returns)
    assert metrics["critic_skipped_steps"] == 1 and metrics["skipped_steps"] == 0
    assert same_bits(before, frozen(critic, optimizers[1]))


def test_explained_variance():
    returns, mask = tensor([1.0, 3.0, NAN]), tensor([1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.zeros(1, 3), returns, mask) == 0
    assert explained_variance(tensor([1.5, 2.5, INF]), returns, mask) == pytest.approx(0.75)
    assert explained_variance(torch.zeros(1, 3), torch.ones(1, 3), mask) == 0  # undefined


def test_ten_updates_raise_the_reward_of_a_bandit():
    """The smallest learning run: after a fixed prompt, ids below 30 pay 1. New samples in each iteration."""
    model, g = micro_llama(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompt, mask, paid = tensor([1, 2, 3]).expand(32, 3), tensor([0, 0, 0, 1]).expand(32, 4), []
    for _ in range(12):
        with torch.no_grad():
            p = model(prompt).logits[:, -1].softmax(-1)
        reply = torch.multinomial(p, 1, generator=g)
        batch = SimpleNamespace(tokens=torch.cat([prompt, reply], 1), loss_mask=mask,
                                turn_ids=torch.zeros(32, 4).long(), group_ids=torch.zeros(32),
                                rewards=(reply < 30).float(), penalties=torch.zeros(32, 1))
        batch.logprobs = torch.cat([torch.zeros(32, 3), p.gather(1, reply).log()], 1)
        paid.append(float(batch.rewards.mean()))
        metrics = update(model, optimizer, batch, compute_advantages("grpo", batch)[0])
        assert metrics["ratio_max_dev"] < 1e-4
    assert sum(paid[-3:]) > sum(paid[:3]) + 0.5


# ----------------------------------------------------------------------------------------------- indicators

def test_indicators():
    def turn(reply, actions, valid=True, thought="two words"):
        return {"reply": reply, "actions": actions, "valid": valid, "thought": thought}

    traj = SimpleNamespace(
        group_ids=tensor(4, 4, 2, 2), success=tensor(True, False, False, False),
        context_cut=tensor(False, True, False, False),
        loss_mask=tensor([0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 0]).bool(),
        entropies=tensor([NAN, 1.0, 2.0], [NAN, 1.0, 2.0], [9.0, 3.0, 9.0], [9.0, 3.0, 9.0]),
        infos=[{"turns": [turn("a", ["Up", "Up"]), turn("x", [], False, "")]}, {"turns": [turn("b", ["Up"], thought="box at 2 3")]},
               {"turns": [turn("c", ["Up"], thought="box at 4 1")]}, {"turns": [turn("c", [], thought="box at 4 1")]}])
    got = indicators(traj, tensor(1.0, 0.0, 0.3, 0.3))
    assert all(type(value) is float for value in got.values())
    assert got == pytest.approx({
        "success": 0.25, "reward_mean": 0.4, "reward_std_in_group": 0.25, "zero_var_frac": 0.5,
        "entropy": 2.0, "valid_frac": 0.8, "context_cut_frac": 0.25, "actions_per_episode": 1.0,
        "reply_len": 1.2, "thought_len": 2.8, "repeated_thought_frac": 0.6, "distinct_reply_frac": 0.75, "pass_at_g": 0.5, "tokens": 6.0})


def test_doctests():
    result = doctest.testmod(starpo)
    assert result.attempted >= 10 and result.failed == 0


def test_demo_runs(capsys):
    state = torch.get_rng_state()
    rollout.toy_batch()
    torch.set_rng_state(state)
    torch.set_printoptions(profile="default")
    assert "ratio_max_dev" in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_a_lone_member_has_no_advantage_whatever_its_reward(value):
    found = starpo.grpo_advantages(torch.tensor([value, 0.0, 2.0]), torch.tensor([7, 1, 1]), normalize_std=False)
    assert found.tolist() == [0.0, -1.0, 1.0]
