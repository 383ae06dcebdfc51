"""Kill a training run, resume it, kill it again: python tests/kill.py --kills 50     (ten minutes; not in CI)

Every run saves after each iteration. After each kill -9, at a random moment, the checkpoint must load and be at most the
iteration at hand behind the log; at the end the run is resumed to a fixed iteration and compared, bit for bit, with one
that nobody killed."""
import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402

from model import find_checkpoint  # noqa: E402

FLAGS = ("--env bandit --groups 2 --group_size 4 --eval_n 4 --eval_every 0 --keep 1 --max_new_tokens 8 --save_every 1 "
         "--estimator gae --threads 1 --device cpu").split()


def start(*flags):
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags], stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)


def saved_since(began: float, out: Path) -> bool:
    """Whether a checkpoint was written since then; the one that is looked at may be renamed under our eyes."""
    try:
        return (out / "checkpoint" / "trainer.json").stat().st_mtime > began
    except FileNotFoundError:
        return False


def main(kills: int, seed: int, folder: Path) -> None:
    dice, out, lost = random.Random(seed), folder / "killed", []
    shutil.rmtree(folder, ignore_errors=True)
    reached = 0
    for number in range(kills):
        going = (out / "metrics.jsonl").exists() and reached
        process = start("--resume", str(out), "--iters", "100000") if going else start(
            *FLAGS, "--iters", "100000", "--out", str(out))
        began, wait = time.time(), None
        while wait is None or time.time() - began < wait:          # up to the first saves, then a random moment
            if process.poll() is not None:
                raise SystemExit(f"run {number} ended by itself: {process.stderr.read()}")
            if wait is None and saved_since(began, out):
                wait = time.time() - began + dice.uniform(0, 1.5)
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        checkpoint = find_checkpoint(out / "checkpoint")
        state = json.loads((checkpoint / "trainer.json").read_text())
        weights = [load_file(path) for path in checkpoint.glob("*.safetensors")]
        assert len(weights) == 3 and all(x.isfinite().all() for tensors in weights for x in tensors.values())
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
        rows = [json.loads(line) for line in lines]
        assert [row["iter"] for row in rows] == list(range(1, len(rows) + 1))
        lost.append(len(rows) - state["iteration"])
        assert 0 <= lost[-1] <= 1 and state["iteration"] >= reached, (lost, state, reached)
        reached = state["iteration"]
        print(f"kill {number + 1}: at iteration {len(rows)}, checkpoint {checkpoint.name} of {reached}", flush=True)
    end = str(reached + 2)
    whole = folder / "whole"
    for process in (start("--resume", str(out), "--iters", end), start(*FLAGS, "--iters", end, "--out", str(whole))):
        assert process.wait() == 0, process.stderr.read()
    names = [path.name for path in (whole / "checkpoint").glob("*.safetensors")]
    for name in names:
        left, right = (load_file(x / "checkpoint" / name) for x in (out, whole))
        assert left.keys() == right.keys() and all((left[key] == right[key]).all() for key in left), name
    print(f"{kills} kills, {sum(lost)} iterations lost in all; after {end} iterations {', '.join(names)} equal those "
          "of a run that nobody killed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill"))
    flags = parser.parse_args()
    main(flags.kills, flags.seed, flags.folder)
