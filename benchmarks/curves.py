"""Curves of ours and of peers: errors against the spread of the logits, time and memory against tokens.

    python benchmarks/curves.py --out curves.jsonl --device cuda --commit COMMIT
    python benchmarks/curves.py --out curves.jsonl --device cpu --head 576,49152 --op spread

`spread`: N(0, 1) hidden states and weights of deviation s / sqrt(H), so that logits have deviation s; targets drawn
from the softmax, as a policy draws its tokens; largest errors against fp64 over all rows. `tokens`: forward + backward
with differentiable entropy, ways in turns as in sweep.py, whose SkyRL operators run here too on a GPU.
`torch_bf16` and `torch_fp32` are F.linear in that type, then log_softmax in fp32 and the entropy from it.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import skyrl_peer
import sweep
import torch
import torch.nn.functional as F

import lmhead

SPREADS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 16.0, 25.0, 40.0)


def plain(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype):
    """The plain way: logits of `dtype` in memory. fp32 means fp32 products, without TF32."""
    log_p = F.log_softmax(F.linear(hidden.to(dtype), weight.to(dtype)).float(), dim=-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def score_ways(x, w, ids, peers):
    ways = {
        "ours": lambda: lmhead.linear_logprobs(x, w, ids, return_entropy=True, inference_only=True),
        "torch_bf16": lambda: plain(x, w, ids, torch.bfloat16),
        "torch_fp32": lambda: plain(x, w, ids, torch.float32),
    }
    if peers is not None:
        skyrl, triton = peers
        batch, v = x.unsqueeze(0), len(w)

        def two_passes(way):
            logprob = way.apply(batch, w, ids.unsqueeze(0).clone(), 0, v, sweep.CHUNK, None, True)[0]
            return logprob, skyrl._fused_vocab_parallel_entropy_from_hidden(batch, w, None, sweep.CHUNK)[0]

        ways["two_pass_torch"] = lambda: two_passes(skyrl.FusedLinearChunkedDistributedLogprob)
        ways["two_pass_triton"] = lambda: two_passes(triton.FusedLinearLogprobTriton)
        ways["combined"] = lambda: triton.LinearCrossEntropy.apply(x, w, ids, 1.0, "none", None)
    return ways


def spread_records(n: int, h: int, v: int, device: torch.device, peers):
    generator = torch.Generator(device).manual_seed(3)
    x = torch.randn(n, h, dtype=torch.bfloat16, device=device, generator=generator)
    unit = torch.randn(v, h, device=device, generator=generator) / h**0.5
    for spread in SPREADS:
        w = (unit * spread).to(torch.bfloat16)
        log_p = torch.log_softmax(torch.cat([x.double() @ part.double().t() for part in w.split(8192)], dim=1), dim=-1)
        prob = log_p.exp()
        ids = torch.multinomial(prob.float(), 1, generator=generator)[:, 0]
        exact = (log_p.gather(1, ids[:, None])[:, 0], -(prob * log_p).nan_to_num(0.0).sum(-1))
        del log_p, prob
        with torch.no_grad():
            for name, run in score_ways(x, w, ids, peers).items():
                errors = [float((got.double().view(-1) - e).abs().max()) for got, e in zip(run(), exact)]
                yield {
                    "op": "spread", "way": name, "n": n, "h": h, "v": v, "dtype": "bfloat16", "spread": spread,
                    "logprob_err": errors[0], "entropy_err": errors[1],
                    "mean_logprob": float(exact[0].mean()), "mean_entropy": float(exact[1].mean()),
                }  # fmt: skip


def token_records(tokens: list[int], h: int, v: int, seconds: float, peers):
    """On a GPU. Ways whose logits do not fit the memory say so."""
    point = sweep.Point("sweep_forward_backward", max(tokens), h, v)
    data = sweep.Data([point])
    for n in tokens:
        p = sweep.Point("sweep_forward_backward", n, h, v)
        runs = sweep.gradient_ways(p, data, *peers, cache_bytes=0)
        ids, _, a, g = runs.pop("targets")()
        x, w = data.hidden(p).detach().requires_grad_(), data.weight(p).detach().requires_grad_()
        runs["torch_bf16"] = lambda: torch.autograd.grad(plain(x, w, ids, torch.bfloat16), (x, w), (a, g))
        ways = {name: sweep.Measured(run) for name, run in runs.items()}
        for way in ways.values():
            way.first_results = None
        torch.cuda.empty_cache()
        sweep.take_turns(ways, data.warm, seconds)
        for name, way in ways.items():
            if name != "gemm":
                found = way.error is None
                yield {
                    "op": "tokens", "way": name, "n": n, "h": h, "v": v, "dtype": "bfloat16", "entropy": "grad",
                    "ms": statistics.median(way.ms) if found else None, "rounds": len(way.ms),
                    "gemm_ms": statistics.median(ways["gemm"].ms),
                    "units": sweep.paired(way.ms, ways["gemm"].ms) if found else None,
                    "extra_mib": way.extra_mib if found else None, "error": way.error,
                }  # fmt: skip


def cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(": ", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines file to append to")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--op", choices=("spread", "tokens"), action="append", help="default: both, on the CPU spread")
    parser.add_argument("--head", default="4096,131072", help="H,V")
    parser.add_argument("--rows", type=int, default=512, help="rows of `spread`")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384,32768", help="counts of `tokens`")
    parser.add_argument("--seconds", type=float, default=1.0, help="of turns, a token count")
    parser.add_argument("--commit", default="", help="recorded; default: git's")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    ops = args.op or (["spread", "tokens"] if cuda else ["spread"])
    if not cuda and "tokens" in ops:
        parser.error("--op: expected spread on the CPU, whose times `lmhead bench --baseline` measures, got tokens")
    h, v = (int(size) for size in args.head.split(","))
    torch.backends.cuda.matmul.allow_tf32 = False
    peers, versions = None, {"torch": torch.__version__}
    if cuda:
        *peers, versions["skyrl"] = skyrl_peer.load()
    commit = args.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    environment = {
        "device": torch.cuda.get_device_name() if cuda else cpu_model(), **versions,
        "commit": commit or "unknown", "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    with args.out.open("a") as file:
        for op in ops:
            begin = time.perf_counter()
            found = (
                spread_records(args.rows, h, v, torch.device(args.device), peers)
                if op == "spread"
                else token_records([int(n) for n in args.tokens.split(",")], h, v, args.seconds, peers)
            )
            for record in found:
                record["backend"] = lmhead.last_backend() if record["way"] == "ours" else None
                file.write(json.dumps(record | environment) + "\n")
                file.flush()
                print({k: v for k, v in record.items() if k not in ("dtype", "op", "h", "v")}, flush=True)
            print(f"{op}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
