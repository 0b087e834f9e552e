"""Packing measured: waste on real length distributions, MFFD against FFD, and speed beside other packers.

    python benchmarks/packing.py waste            # four distributions of shapes/lengths.tsv, 20,000 lengths each
    python benchmarks/packing.py wins             # 1,600 seeded batches of 2048
    python benchmarks/packing.py speed            # 1,000,000 lengths here; 20,000 beside the others
        [--nemo-rl nemo_rl/data/packing/algorithms.py]   [--skyrl skyrl/train/dataset/bin_packing.py]

Prints JSON lines. The other packers are given by the path of their source file, which is loaded by itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

import lmhead

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETS = [("gsm8k_train", 2048), ("azure_conv", 8192), ("arxiv", 4096), ("mooncake_conv", 32768)]


def quantiles(name):
    rows = [line.split("\t") for line in (ROOT / "shapes/lengths.tsv").read_text().splitlines() if line[0] != "#"]
    row = dict(zip(rows[0], next(r for r in rows if r[0] == name)))
    at = {"min": 0.0, "max": 1.0, **{k: float(k[1:]) / 100 for k in rows[0] if k[0] == "p"}}
    points = sorted((p, float(row[k])) for k, p in at.items())
    return [p for p, _ in points], [value for _, value in points]


def draw(name, count, capacity, seed):
    """Lengths by inverting the piecewise linear distribution function, cut to the capacity."""
    uniform = np.random.default_rng(seed).random(count)
    lengths = np.rint(np.interp(uniform, *quantiles(name))).astype(np.int64)
    return np.clip(lengths, 1, capacity)


def cpu():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def record(**fields):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    command = "python benchmarks/packing.py " + " ".join(pathlib.Path(a).name if "/" in a else a for a in sys.argv[1:])
    print(json.dumps({**fields, "device": cpu(), "commit": commit, "command": command}), flush=True)


def waste(arguments):
    for name, capacity in SETS:
        lengths = draw(name, 20_000, capacity, arguments.seed)
        bound = lmhead.packing_lower_bound(lengths, capacity)
        for algorithm in ("ffd", "mffd", "bfd", "balanced", "concatenative"):
            metrics = lmhead.packing_metrics(lengths, capacity, lmhead.pack(lengths, capacity, algorithm))
            record(
                op="packing_waste", set=name, capacity=capacity, sequences=20_000, seed=arguments.seed,
                algorithm=algorithm, bins=metrics.bins, lower_bound=bound, waste=round(metrics.waste, 6),
                utilization=round(metrics.utilization, 6), balance=round(metrics.balance, 6),
            )  # fmt: skip


def wins(arguments):
    for name, capacity in SETS:
        result = {"wins": 0, "ties": 0, "losses": 0}
        bins = {"ffd": 0, "mffd": 0, "lower_bound": 0}
        for seed in range(400):
            lengths = draw(name, 2048, capacity, [arguments.seed, seed])
            ffd, mffd = (len(lmhead.pack(lengths, capacity, algorithm)) for algorithm in ("ffd", "mffd"))
            result["wins" if mffd < ffd else "losses" if mffd > ffd else "ties"] += 1
            bins["ffd"] += ffd
            bins["mffd"] += mffd
            bins["lower_bound"] += lmhead.packing_lower_bound(lengths, capacity)
        record(op="packing_wins", set=name, capacity=capacity, batches=400, batch_size=2048, seed=arguments.seed, **result, bins=bins)


def plain_first_fit_decreasing(lengths, capacity):
    bins, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for bin, left in enumerate(room):
            if left >= lengths[index]:
                bins[bin].append(index)
                room[bin] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(capacity - lengths[index])
    return bins


def load(path):
    spec = importlib.util.spec_from_file_location("other_packer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def timed(function, repetitions):
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        bins = function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), len(bins)


def speed(arguments):
    for name, capacity in [*SETS, ("uniform", 2048), ("uniform", 32768)]:
        if name == "uniform":
            lengths = np.random.default_rng(arguments.seed).integers(1, capacity, 1_000_000, endpoint=True)
        else:
            lengths = draw(name, 1_000_000, capacity, arguments.seed)
        for algorithm in ("ffd", "mffd"):
            seconds, bins = timed(lambda: lmhead.pack(lengths, capacity, algorithm), 3)
            record(op="packing_speed", packer="lmhead", algorithm=algorithm, set=name, capacity=capacity, sequences=1_000_000, bins=bins, s=round(seconds, 4))
    lengths = draw("azure_conv", 20_000, 8192, arguments.seed)
    as_list = lengths.tolist()
    rivals = [("lmhead", a, lambda a=a: lmhead.pack(as_list, 8192, a)) for a in ("ffd", "mffd")]
    rivals.append(("plain Python", "ffd", lambda: plain_first_fit_decreasing(as_list, 8192)))
    if arguments.nemo_rl:
        other = load(arguments.nemo_rl)
        for algorithm, packer in (("ffd", other.FirstFitDecreasingPacker), ("mffd", other.ModifiedFirstFitDecreasingPacker)):
            rivals.append(("NeMo-RL", algorithm, lambda packer=packer: packer(8192).pack(as_list)))
    if arguments.skyrl:
        other = load(arguments.skyrl)
        rivals.append(("SkyRL", "ffd", lambda: other.make_seq_packer("first_fit_decreasing", 8192).pack(as_list)))
    for packer, algorithm, function in rivals:
        seconds, bins = timed(function, 5 if packer == "lmhead" else 1)
        record(op="packing_speed", packer=packer, algorithm=algorithm, set="azure_conv", capacity=8192, sequences=20_000, bins=bins, s=round(seconds, 5))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("waste", "wins", "speed"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nemo-rl", help="path of nemo_rl/data/packing/algorithms.py")
    parser.add_argument("--skyrl", help="path of skyrl/train/dataset/bin_packing.py")
    arguments = parser.parse_args()
    {"waste": waste, "wins": wins, "speed": speed}[arguments.what](arguments)
