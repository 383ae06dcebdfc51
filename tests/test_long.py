"""Long runs and many devices: several processes compute what one does; Ctrl-C, LoRA, non-finite steps, dry runs."""
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, micro_gpt2, micro_llama
from safetensors.torch import load_file
from test_train import QUICK, micro, read, run, same_run, undrawn, user, weights  # noqa: F401
from transformers import (AutoModelForCausalLM, BloomConfig, BloomForCausalLM, CohereConfig, CohereForCausalLM,
                          GPTNeoConfig, GPTNeoForCausalLM, MambaConfig, MambaForCausalLM, Phi3Config, Phi3ForCausalLM)

import bench
import train
from envs import make_env
from model import context_length
from rollout import join, probe, rollout

SINGLE = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def torchrun(processes, micro, out, *flags):
    """train.py under torchrun with gloo; returns the completed process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port),
         str(ROOT / "train.py"), "--model", micro, "--out", str(out), *QUICK, *map(str, flags)],
        capture_output=True, text=True, env=SINGLE, timeout=900)


@pytest.mark.parametrize("flags", [
    "--estimator gae --algo starpo --groups 3 --minibatch_size 4 --env sokoban --epochs 2",
    "--estimator grpo --keep 0.3 --groups 3 --env pick --entropy_coef 0.01 --tokens_per_micro_batch 64",
], ids=["gae, KL", "the filter keeps one group"])
def test_two_processes_are_one(micro, tmp_path, user, flags):  # noqa: F811
    flags = [*flags.replace("--env pick", f"--env {user}:Pick --max_turns 1 --max_actions 1").split(), "--iters", "3",
             "--group_size", "4"]
    one, two = tmp_path / "one", tmp_path / "two"
    a = run(micro, one, *flags)
    done = torchrun(2, micro, two, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    b = read(two)
    assert sum(row.get("grad_norm", 0) > 0 for row in a) >= 1
    assert [row.keys() for row in a] == [row.keys() for row in b]
    for row, other in zip(a, b):
        for key in row.keys() - {"seconds", "ratio_max_dev"}:
            assert other[key] == pytest.approx(row[key], rel=1e-4, abs=2e-5), key
        assert max(row["ratio_max_dev"], other["ratio_max_dev"]) < 1e-5
    norms = [[row["grad_norm"] for row in rows if row.get("grad_norm")][0] for rows in (a, b)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)  # of the first step, the weights being the same
    assert (one / "samples" / "00001.txt").read_text() == (two / "samples" / "00001.txt").read_text()
    (left, state), (right, other) = weights(one), weights(two)
    assert left.keys() == right.keys() and state == other
    for key in left:
        if "optimizers" not in key[0]:
            assert (left[key] - right[key]).norm() <= 1e-5 * max(left[key].norm(), 1), key
    keys = ("success_before", "success_after", "success_random", "eval_n")
    assert [[json.loads((x / "summary.json").read_text())[key] for key in keys] for x in (one, two)][0] == [
        json.loads((two / "summary.json").read_text())[key] for key in keys]
    assert done.stdout.count("before training") == 1  # the second process is silent


def test_more_processes_than_groups_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(SystemExit) as stop:
        train.main(["--groups", "8"])
    assert stop.value.code == 2 and "--groups 8" in capsys.readouterr().err


def test_joined_batches_keep_every_row(tok):
    """Parts of other lengths and turn counts, one behind the other."""
    policy = micro_llama(tok)
    parts = [rollout(policy, tok, [make_env("sokoban", max_turns=turns) for _ in range(2)], [1, 2], [3, 4], [g, g],
                     max_new_tokens=new) for turns, new, g in ((1, 4, 0), (3, 9, 1))]
    both = join(parts)
    assert len(both) == 4 and both.group_ids.tolist() == [0, 0, 1, 1]
    for part, first in zip(parts, (0, 2)):
        T, K = part.tokens.shape[1], part.rewards.shape[1]
        for name, width in (("tokens", T), ("loss_mask", T), ("logprobs", T), ("turn_ids", T), ("rewards", K)):
            rows = getattr(both, name)[first:first + 2]
            assert torch.equal(rows[:, :width], getattr(part, name))
            assert (rows[:, width:] == (-1 if name == "turn_ids" else 0)).all()
        assert both.texts[first:first + 2] == part.texts and both.infos[first:first + 2] == part.infos


# ---------------------------------------------------------------------------------------------------- interrupted

def test_ctrl_c_saves_and_the_resumed_run_is_the_uninterrupted_one(micro, tmp_path):  # noqa: F811
    flags = ["--model", micro, *QUICK, "--save_every", "0"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.main([*flags, "--iters", "200", "--out", str(cut / "never"), "--dry_run"])  # leaves nothing
    assert not cut.exists()
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags, "--iters", "500", "--out", str(cut)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=SINGLE)
    metrics = cut / "metrics.jsonl"
    deadline = time.time() + 100
    while time.time() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    done = len(read(cut))
    assert process.returncode == 1 and f"saved after iteration {done}" in err and f"--resume {cut}" in err
    assert "Traceback" not in err and 2 <= done < 500
    train.main(["--resume", str(cut), "--iters", str(done + 1)])
    run(micro, whole, "--save_every", 0, "--iters", done + 1)
    same_run(read(whole), read(cut), whole, cut)


def test_ctrl_c_is_the_callers_again_behind_a_run(micro, tmp_path):  # noqa: F811
    before = signal.getsignal(signal.SIGINT)
    run(micro, tmp_path / "run", "--iters", 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_several_steps_that_are_not_finite_stop_the_run(micro, tmp_path, monkeypatch):  # noqa: F811
    """The good checkpoint is named, and stays."""
    good = []

    def broken(*args, **options):
        metrics = update(*args, **options)
        if len(good) < 2:
            good.append(1)
            return metrics
        return metrics | {"optimizer_steps": 0, "skipped_steps": 1}

    update = train.update
    monkeypatch.setattr(train, "update", broken)
    with pytest.raises(SystemExit) as stop:
        run(micro, tmp_path / "run", "--iters", 20, "--save_every", 2)
    assert "without a finite gradient" in str(stop.value) and str(tmp_path / "run" / "checkpoint") in str(stop.value)
    assert len(read(tmp_path / "run")) == 5
    assert json.loads((tmp_path / "run" / "checkpoint" / "trainer.json").read_text())["iteration"] in (2, 4)


def test_weights_that_are_not_finite_are_not_saved(micro, tmp_path, monkeypatch):  # noqa: F811
    def poison(policy, *args, **options):
        metrics = update(policy, *args, **options)
        with torch.no_grad():
            next(policy.parameters()).fill_(float("nan"))
        return metrics

    update = train.update
    monkeypatch.setattr(train, "update", poison)
    with pytest.raises(SystemExit) as stop:
        run(micro, tmp_path / "run", "--iters", 1)
    assert "non-finite weights" in str(stop.value) and not (tmp_path / "run" / "checkpoint").exists()


# ----------------------------------------------------------------------------------------------------------- LoRA

def test_lora_trains_resumes_and_leaves_an_ordinary_folder(micro, tmp_path):  # noqa: F811
    flags = ["--lora_rank", 4, "--estimator", "gae", "--algo", "starpo", "--lr", 1e-2, "--warmup", 0]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    a = run(micro, whole, *flags, "--iters", 3)
    run(micro, parts, *flags, "--iters", 2)
    train.main(["--resume", str(parts), "--iters", "3"])
    same_run(a, read(parts), whole, parts)
    start, end = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (micro, whole / "checkpoint"))
    moved = {key for key in start if not torch.equal(start[key], end[key])}
    assert start.keys() == end.keys() and moved and all("proj" in key for key in moved)
    moments = load_file(whole / "checkpoint" / "optimizers.safetensors")
    full = sum(x.numel() for x in AutoModelForCausalLM.from_pretrained(micro).parameters())
    assert sum(x.numel() for key, x in moments.items() if key.startswith("policy")) < full


# ----------------------------------------------------------------------------------------------------- plans, presets

def test_the_paper_preset_and_the_flags_above_it(micro, capsys):  # noqa: F811
    cfg = train.configure(["--preset", "paper", "--model", micro, "--groups", "4"])
    assert (cfg.model, cfg.groups, cfg.group_size, cfg.estimator) == (micro, 4, 16, "gae")
    assert (cfg.lr, cfg.iters, cfg.minibatch_size, cfg.keep) == (1e-6, 200, 32, 0.25)
    assert cfg.critic_lr == pytest.approx(1e-5)
    plan = train.main(["--preset", "paper", "--model", micro, "--dry_run", "--max_new_tokens", "20"])
    assert json.loads(capsys.readouterr().out) == plan
    policy = micro_parameters(micro)
    assert plan["parameters"] == plan["trained"] == policy
    assert plan["weights"] == pytest.approx(4 * policy / 2**30) and plan["optimizer"] == 2 * plan["weights"]
    assert plan["tokens, an iteration"] > 8 * 16 * 5 * 20
    small = train.main(["--model", micro, "--dry_run", "--max_new_tokens", "20", "--lora_rank", "2"])
    assert small["trained"] < policy and "critic" not in small


def micro_parameters(path):
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())


# ---------------------------------------------------------------------------------------------------------- the probe

def test_the_probe_passes_what_packs_and_refuses_what_does_not(tok):
    size = len(tok)
    for policy in (micro_llama(tok), micro_gpt2(tok)):
        probe("fine", policy.eval())
    torch.manual_seed(0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1, state_size=4))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=size, hidden_size=16, n_layer=1, n_head=2))
    cohere = CohereForCausalLM(CohereConfig(vocab_size=size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                            num_attention_heads=2, logit_scale=50.0, initializer_range=0.5,
                                            pad_token_id=0, bos_token_id=1, eos_token_id=2))    # scales its logits
    local = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=size, hidden_size=16, num_layers=2, num_heads=2, window_size=256,
                                           attention_types=[[["global", "local"], 1]], initializer_range=0.5))
    blind = micro_llama(tok)
    seeing = blind.base_model.forward
    blind.base_model.forward = lambda attention_mask=None, **inputs: seeing(**inputs)           # plainly causal
    silent = micro_llama(tok)
    silent.base_model.forward = lambda **inputs: 1 / 0 if inputs["input_ids"].shape[0] == 1 else None
    for policy in (mamba, bloom, cohere, local, blind, silent):
        with pytest.raises(ValueError, match="packed rows") as error:
            probe("odd", policy.eval())
        assert "\n" not in str(error.value) and "--model odd" in str(error.value)


def test_a_longrope_model_stays_within_its_first_length():
    """Phi-3's rotary embedding turns all positions otherwise once a row is longer."""
    config = Phi3Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                        max_position_embeddings=512, original_max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
                        bos_token_id=2, rope_parameters=dict(
                            rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
                            original_max_position_embeddings=128))
    assert context_length(Phi3ForCausalLM(config)) == 128
    config.rope_parameters = dict(rope_type="default", rope_theta=1e4)
    assert context_length(Phi3ForCausalLM(config)) == 512 and context_length(None) is None


# ------------------------------------------------------------------------------------------------------- the benchmark

def test_the_benchmark_prints_and_writes_its_numbers(micro, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Its dialogues are the trajectories' own, and sharing pays in tokens, whatever the clock says."""
    monkeypatch.setitem(bench.SHAPES, "other", dict(groups=2, size=4, turns=2, new_tokens=6, tokens_a_pass=2048))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--model", micro, "--repeats", "1", "--json", str(tmp_path / "x.json")])
    bench.main()
    found, printed = json.loads((tmp_path / "x.json").read_text()), capsys.readouterr().out
    assert all(key in printed for key in found)
    assert {"rollout_speedup", "update_speedup", "update_memory_ratio", "matmul_share"} <= found.keys()
    assert 0 < found["tokens_forwarded_per_token"] < 0.9 < found["baseline_tokens_forwarded_per_token"]
    assert found["update_tokens_forwarded_per_token"] < 0.9 < 1 <= found["baseline_update_tokens_forwarded_per_token"]
    assert found["ratio_max_dev"] < 1e-5 and 0 < found["sampled_tokens"] < found["trajectory_tokens"]
    policy, tokenizer = train.load_policy(micro)
    batch = bench.play(policy, tokenizer, bench.SHAPES["other"], 1)
    for row, texts in enumerate(bench.texts_of(batch, tokenizer, policy)):
        rendered = tokenizer.apply_chat_template(
            [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[:3])],
            tokenize=False, add_generation_prompt=True) + "<think>"
        shown = batch.tokens[row, :int(((batch.turn_ids[row] == 1) & batch.loss_mask[row]).nonzero().min())]
        assert tokenizer.decode(shown) == rendered


# --------------------------------------------------------------------------------------------------------- a real model

@pytest.fixture(scope="session")
def smollm(tmp_path_factory):
    """A pretrained chat model of 135 M parameters, where the script that fetches it is at hand."""
    script = ROOT.parent / "shared" / "real_model.py"
    if not script.exists():
        pytest.skip("no script here that fetches a real model")
    path = tmp_path_factory.mktemp("real") / "smollm2"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the real model could not be fetched: {done.stderr[-300:]}")
    return str(path)


def test_an_iteration_with_a_real_model(smollm, tmp_path):
    """README's two commands, one iteration each: the warm start on the format, then RL; and LoRA with less memory."""
    small = ("--env bandit --iters 1 --groups 1 --eval_n 4 --eval_every 0 --max_new_tokens 24 --keep 1 --warmup 0 "
             "--no_normalize_std").split()
    train.main([*small, "--algo", "sft", "--careful", "0", "--model", smollm, "--group_size", "8", "--lr", "3e-5",
                "--out", str(tmp_path / "sft")])
    assert read(tmp_path / "sft")[0]["nll"] > 0.5
    moments = {}
    for rank in (0, 16):
        out = tmp_path / str(rank)
        train.main([*small, "--model", str(tmp_path / "sft" / "checkpoint"), "--group_size", "6", "--lr", "2e-5",
                    "--lora_rank", str(rank), "--format_penalty", "1", "--out", str(out)])
        (row,) = read(out)
        assert row["optimizer_steps"] + row["skipped_steps"] <= 1
        if row["optimizer_steps"] and row["grad_norm"]:
            assert row["ratio_max_dev"] < 1e-4
        state = load_file(out / "checkpoint" / "optimizers.safetensors")
        moments[rank] = sum(x.numel() for x in state.values())
    assert not moments[0] or moments[16] < 0.05 * moments[0]
    start, end = (AutoModelForCausalLM.from_pretrained(tmp_path / x / "checkpoint") for x in ("sft", "16"))
    assert start.state_dict().keys() == end.state_dict().keys()
