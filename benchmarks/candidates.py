"""Candidate sets and selected ids on a GPU, beside the plain ways, in one interleaved run.

    python benchmarks/candidates.py --out benchmarks/results/nvidia-h200-candidates.jsonl

Support: lmhead.support_logprobs against the chunked torch gather-multiply-sum over the same ids and against the full
projection (lmhead.linear_logprobs); the bound is the bytes of N x K weight rows at the device's bandwidth, a copy's or a
reduction's, whichever is higher.
Selected: lmhead.selected_logprobs against linear_logprobs alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch

import lmhead


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="of candidate sets")
    parser.add_argument("--pairs", type=int, default=31, help="of linear_logprobs and selected_logprobs")
    parser.add_argument("--only", choices=["support", "selected"])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    return parser.parse_args()


def torch_chunked(hidden, weight, ids, sampled, budget=1 << 30):
    """Gather the weight rows, multiply, sum: the plain way, in row chunks of at most `budget` bytes of fp32."""
    n, k = ids.shape
    rows = max(1, budget // (k * hidden.shape[1] * 4))
    logprobs, entropies = [], []
    for begin in range(0, n, rows):
        x, i, y = hidden[begin : begin + rows].float(), ids[begin : begin + rows], sampled[begin : begin + rows]
        z = (weight[i.clamp_min(0).long()].float() * x[:, None]).sum(-1).masked_fill(i < 0, -torch.inf)
        log_p = torch.log_softmax(z, -1)
        zy = (weight[y].float() * x).sum(-1)
        logprobs.append(zy - z.logsumexp(-1))
        entropies.append(-(log_p.exp() * log_p.masked_fill(i < 0, 0.0)).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def interleaved(candidates: dict, rounds: int, calls: int = 4) -> dict[str, list[float]]:
    """ms a call in each round; `calls` in a row, so that the time in which the host queues the first hides behind the
    others."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for r in range(rounds + 2):
        for name, fn in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                fn()
            end.record()
            end.synchronize()
            if r >= 2:  # two rounds to warm up
                times[name].append(begin.elapsed_time(end) / calls)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(t) for name, t in times.items()}


def extra_mib(fn) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = fn()
    torch.cuda.synchronize()
    kept = sum(t.numel() * t.element_size() for t in result)
    return (torch.cuda.max_memory_allocated() - before - kept) / 2**20


def main() -> int:
    a = arguments()
    torch.manual_seed(0)
    hidden = torch.randn(a.tokens, a.hidden, device="cuda").bfloat16()
    weight = (torch.randn(a.vocab, a.hidden, device="cuda") * 1.5 / a.hidden**0.5).bfloat16()
    targets = torch.randint(0, a.vocab, (a.tokens,), device="cuda")
    copy = torch.empty_like(weight)
    sets = {"uniform": torch.randint(0, a.vocab, (a.tokens, a.k), device="cuda", dtype=torch.int32)}
    # Real supports repeat ids: a Zipf law over the vocabulary, exponent 1.
    ranks = torch.exp(torch.rand(a.tokens, a.k, device="cuda") * torch.log(torch.tensor(float(a.vocab)))).long() - 1
    sets["zipf"] = ranks.clamp(0, a.vocab - 1).int()
    records = []
    for ids_name, ids in sets.items() if a.only != "selected" else ():
        sampled = ids[:, 0].long()
        got = lmhead.support_logprobs(hidden, weight, ids, sampled)
        rows = slice(0, 64)
        z = torch.cat([hidden[rows].double() @ w.double().T for w in weight.split(16384)], dim=1)
        member = torch.zeros(64, a.vocab, dtype=torch.bool, device="cuda").scatter_(1, ids[rows].long(), True)
        lse = z.masked_fill(~member, -torch.inf).logsumexp(-1)
        log_p = torch.where(member, z - lse[:, None], 0.0)
        want = z.gather(1, sampled[rows, None])[:, 0] - lse
        want_entropy = -(torch.where(member, log_p.exp(), 0.0) * log_p).sum(-1)
        errors = [(g[rows].double() - w).abs().max().item() for g, w in zip(got, (want, want_entropy))]
        del z, member
        times = medians(interleaved(
            {
                "copy": lambda: copy.copy_(weight),
                "read": lambda: weight.view(torch.int32).amax(),
                "support": lambda: lmhead.support_logprobs(hidden, weight, ids, sampled),
                "torch_chunked": lambda: torch_chunked(hidden, weight, ids, sampled),
                "full": lambda: lmhead.linear_logprobs(hidden, weight, sampled, return_entropy=True),
            },
            a.rounds,
        ))
        # Bytes a ms: a copy reads and writes, a reduction only reads; the bound takes the faster.
        bandwidth = weight.numel() * weight.element_size() * max(2 / times["copy"], 1 / times["read"])
        bound = a.tokens * a.k * a.hidden * weight.element_size() / bandwidth
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

        def backward():
            logprob, entropy = lmhead.support_logprobs(x, w, ids, sampled, entropy_requires_grad=True)
            return torch.autograd.grad((logprob - 0.01 * entropy).sum(), (x, w))

        first, second = backward(), backward()
        repeats = all(torch.equal(p, q) for p, q in zip(first, second))
        del first, second
        both = medians(interleaved({"forward_backward": backward}, 5, 2))["forward_backward"]
        del x, w
        records.append({
            "op": "support", "backend": "cuda_portable", "ids": ids_name, "k": a.k, "entropy": "metric",
            "ms": times["support"], "tb_per_s": bandwidth / 1e9, "copy_ms": times["copy"], "read_ms": times["read"], "bound_ms": bound, "times_bound": times["support"] / bound,
            "baseline": "torch_chunked", "baseline_ms": times["torch_chunked"],
            "speedup": times["torch_chunked"] / times["support"], "full_ms": times["full"],
            "speedup_full": times["full"] / times["support"], "forward_backward_ms": both,
            "backward_repeats_bitwise": repeats, "logprob_err": errors[0], "entropy_err": errors[1],
            "extra_mib": extra_mib(lambda: lmhead.support_logprobs(hidden, weight, ids, sampled)),
        })  # fmt: skip
    times = {} if a.only == "support" else interleaved(
        {
            "plain": lambda: lmhead.linear_logprobs(hidden, weight, targets, return_entropy=True),
            **{
                name: lambda ids=ids: lmhead.selected_logprobs(hidden, weight, targets, ids, return_entropy=True)
                for name, ids in sets.items()
            },
        },
        a.pairs,
    )
    for name in times.keys() & sets.keys():
        # The clock follows the chip's power: only neighbours are compared.
        ratios = [t / p for t, p in zip(times[name], times["plain"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        records.append({
            "op": "selected", "backend": lmhead.last_backend(), "ids": name, "k": a.k, "entropy": "metric",
            "ms": statistics.median(times[name]), "plain_ms": statistics.median(times["plain"]),
            "ratio": quarters[1], "ratio_quarters": [quarters[0], quarters[2]], "pairs": len(ratios),
        })  # fmt: skip
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    for record in records:
        record |= {
            "n": a.tokens, "h": a.hidden, "v": a.vocab, "dtype": "bfloat16", "device": torch.cuda.get_device_name(),
            "driver": driver, "torch": torch.__version__, "commit": a.commit, "command": " ".join(sys.argv),
        }  # fmt: skip
        line = json.dumps(record)
        print(line)
        if a.out:
            with open(a.out, "a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
