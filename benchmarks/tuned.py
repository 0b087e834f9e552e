"""The analytic default beside the tuned choice over the sweep's local shapes, and the time of a full tune of one head.

    python benchmarks/tuned.py --out benchmarks/results/tuned-nvidia-h200.jsonl --budget-s 300

A record a shape and operation: `times` has each configuration's ms and its median ratio to the default within turns, and
`of_default` the smallest of them, so 0.97 or more means that the default is within 3 % of the best choice. Nothing is
saved. The `tune_head` record is a tune of one head as `lmhead tune --head NAME` does it, `seconds` of wall time.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import time

import sweep
import torch

import lmhead


CONFIGURATIONS, FLOPS = 4, 6.5e14  # of a turn; a second


def records(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines file to append to")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="end before this many seconds have passed")
    parser.add_argument("--seconds", type=float, default=0.4, help="of turns, a shape and operation; at least three turns")
    parser.add_argument("--turns", type=int, default=3, help="about so many, where --seconds gives fewer")
    parser.add_argument("--again", type=pathlib.Path, help="only the shapes whose ratio in this file is below 0.98")
    parser.add_argument("--case", action="append", metavar="N,H,V", help="only such shapes, forward with the metric entropy")
    parser.add_argument("--head-seconds", type=float, default=40.0, help="of turns of the full tune; 0: none")
    parser.add_argument("--commit", default="", help="recorded; default: git's")
    args = parser.parse_args()
    start = time.perf_counter()
    commit = args.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    environment = {
        "device": torch.cuda.get_device_name(),
        "commit": commit or "unknown",
        "command": " ".join(["python", *sys.argv]),
    }
    with args.out.open("a") as file:

        def write(record: dict[str, object]) -> None:
            file.write(json.dumps(record | environment) + "\n")
            file.flush()

        if args.head_seconds > 0:
            head, tokens = "nemotron-super", (2048, 8192, 16384, 32768)
            begin = time.perf_counter()
            for n in tokens:  # long problems need the time; short ones have their turns in less
                share = args.head_seconds / 2 * n / sum(tokens)
                choices = lmhead.tune(*sweep.HEADS[head], n, entropy="grad", seconds=share, save=False)
                print(n, [(c.operation, c.configuration, c.turns) for c in choices], flush=True)
            seconds = time.perf_counter() - begin
            write({"op": "tune_head", "head": head, "tokens": tokens, "seconds": seconds})
            print(f"tune of {head}: {seconds:.1f} s", flush=True)
        pace, worst = 0.0, 1.0  # seconds a FLOP of the last shape
        points = [p for p in sweep.points() if p.active == 1]
        if args.again is not None:
            slow = {(r["n"], r["h"], r["v"], r["entropy"]) for r in records(args.again) if r.get("of_default", 1) < 0.98}
            points = [p for p in points if (p.n, p.h, p.v, "metric" if p.op == "sweep_forward" else "grad") in slow]
        if args.case is not None:
            cases = [tuple(int(size) for size in case.split(",")) for case in args.case]
            points = [p for p in points if p.op == "sweep_forward" and (p.n, p.h, p.v) in cases]
        for k, p in enumerate(points):
            begin = time.perf_counter()
            if begin - start + pace * p.flop > args.budget_s:
                print(f"{len(points) - k} points are left")
                break
            forward = p.op == "sweep_forward"
            mode = "metric" if forward else "grad"
            seconds = max(args.seconds, args.turns * CONFIGURATIONS * p.flop / FLOPS)
            choices = lmhead.tune(
                p.h, p.v, p.n, entropy=mode, inference_only=forward, seconds=seconds, save=False
            )
            for choice in choices:
                times = [dataclasses.asdict(t) for t in choice.times]
                of_default = min(t["of_default"] for t in times)
                worst = min(worst, of_default)
                write({
                    "op": f"tune_{choice.operation}", "backend": choice.backend, "n": p.n, "h": p.h, "v": p.v,
                    "dtype": "bfloat16", "entropy": mode, "configuration": choice.configuration,
                    "of_default": of_default, "times": times, "turns": choice.turns, "logical": p.logical,
                })  # fmt: skip
                print(
                    f"{choice.operation} {p.n}x{p.h}x{p.v}: {choice.configuration}, "
                    + ", ".join(f"{t['configuration']} {t['of_default']:.4f}" for t in times),
                    flush=True,
                )
            pace = (time.perf_counter() - begin) / p.flop if forward else 0.0
        print(f"smallest ratio to the default: {worst:.4f}")


if __name__ == "__main__":
    main()
