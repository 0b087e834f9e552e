"""Forward + backward with a differentiable entropy on one GPU, beside SkyRL's own operators, in one interleaved run.

    pip install --no-deps skyrl==0.4.0
    python benchmarks/skyrl_backward.py --out benchmarks/results/nvidia-h200-peers.jsonl

`triton`: SkyRL's fused operator, log-prob and entropy from one projection. `two_pass`: its fused log-prob and the
separate differentiable entropy, `vocab_parallel_entropy` of projected logits, which is how its trainers get an entropy
gradient. Values and gradients are compared before anything is timed. Medians over CUDA events, candidates in turn;
one JSON record a baseline: ms is ours, ratio = baseline_ms / ms.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import skyrl_peer
import torch
import torch.nn.functional as F

import lmhead


def problem(args):
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape, std=1.0):
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(0, std, generator=generator)

    ids = torch.randint(0, args.vocab, (args.tokens,), device="cuda", generator=generator)
    upstream = torch.randn(2, args.tokens, device="cuda", generator=generator)
    weight = normal(args.vocab, args.hidden, std=1.5 / args.hidden**0.5)
    return normal(args.tokens, args.hidden).requires_grad_(), weight.requires_grad_(), ids, upstream


def candidates(model_utils, triton, vocab):
    def ours(x, w, ids):
        return lmhead.linear_logprobs(x, w, ids, return_entropy=True, entropy_requires_grad=True)

    def fused(x, w, ids):
        return triton.linear_cross_entropy(x, w, ids, 1.0, "none", None)

    def two_pass(x, w, ids):
        logprob = triton.FusedLinearLogprobTriton.apply(x[None], w, ids[None], 0, vocab, x.shape[0], None, False)[0]
        return logprob, model_utils.vocab_parallel_entropy(F.linear(x, w))

    return {"ours": ours, "triton": fused, "two_pass": two_pass}


def step(function, x, w, ids, upstream):
    x.grad = w.grad = None
    logprob, entropy = function(x, w, ids)
    torch.autograd.backward((logprob, entropy), (upstream[0], upstream[1].to(entropy.dtype)))
    return logprob.detach(), entropy.detach()


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("hidden", 4096), ("vocab", 131072), ("reps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    model_utils, triton, version = skyrl_peer.load()
    data = problem(args)
    functions = candidates(model_utils, triton, args.vocab)
    results, differences = {}, {}
    for name, function in functions.items():
        values = step(function, *data)
        results[name] = (*values, data[0].grad.clone(), data[1].grad.clone())
        if name == "ours":
            continue
        mine = results["ours"]
        differences[name] = {
            "logprob_diff": float((results[name][0] - mine[0]).abs().max()),
            "entropy_diff": float((results[name][1].float() - mine[1]).abs().max()),
            "dx_diff": relative(results[name][2], mine[2]),
            "dw_diff": relative(results[name][3], mine[3]),
        }
        del results[name]
    # The two-pass entropy is computed from logits that were rounded to bf16, and so are its gradients.
    limits = {"triton": (1e-3, 2e-2), "two_pass": (1e-3, 2e-1)}
    for name, found in differences.items():
        values, gradients = limits[name]
        if not (found["logprob_diff"] <= values and found["dx_diff"] <= gradients and found["dw_diff"] <= gradients):
            raise SystemExit(f"skyrl_backward: {name} computes something else, nothing was timed: {found}")
    del results
    times = {name: [] for name in functions}
    for turn in range(args.reps + 2):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(function, *data)
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    commit = args.commit
    if not commit:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, found in differences.items():
        record = {
            "op": "forward_backward", "backend": lmhead.last_backend(), "n": args.tokens, "h": args.hidden,
            "v": args.vocab, "dtype": "bfloat16", "entropy": "grad", "ms": medians["ours"],
            "baseline": f"skyrl {version} {name}", "baseline_ms": medians[name], "ratio": medians[name] / medians["ours"],
            **found, "rounds": args.reps, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "commit": commit, "command": " ".join(["python", *sys.argv]),
        }  # fmt: skip
        print(json.dumps(record), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
