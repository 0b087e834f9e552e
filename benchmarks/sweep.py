"""Sweep over heads, tokens and parallel layouts on one GPU, beside SkyRL and cuBLAS.

    python benchmarks/sweep.py --out benchmarks/results/sweep-nvidia-h200.jsonl --resume --budget-s 540
    python benchmarks/sweep.py --summary benchmarks/results/sweep-nvidia-h200.jsonl

Four heads, 16K to 256K tokens, ten layouts with TP x CP <= 8: 200 logical points. A rank of a layout works on
(tokens / CP, H, V / TP); the 104 different local shapes are each measured once, without collectives. Timed in turns,
every second turn backwards: `linear_logprobs` with entropy; SkyRL's fused log-prob (its torch and its Triton backend)
and its separate entropy projection, which together are its two passes, the faster log-prob counted; its combined Triton
kernel; and one cuBLAS product of the shape, the unit. Forward + backward with differentiable entropy at TP4/CP2, 16K.

A record is appended as soon as its point is measured; with --resume, points that the file has are left out, and with
--budget-s the run ends before a point that would not fit. Fields: docs/measuring.md.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import skyrl_peer
import tile_skipping
import torch
import torch.nn.functional as F

import lmhead

HEADS = {
    "nemotron-super": (4096, 131072),
    "nemotron-ultra": (8192, 131072),
    "glm-flash": (4096, 154880),
    "kimi-k2": (7168, 163840),
}
TOKENS = tuple(1024 * k for k in (16, 32, 64, 128, 256))
LAYOUTS = tuple((tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8)
ACTIVE = (1.0, 0.95, 0.73, 0.64, 0.23)
CHUNK = 1024  # SkyRL's default logprobs_chunk_size
SAMPLED_ROWS = 16

Results = tuple[torch.Tensor, ...]


class Point:
    """One local shape, and the logical points whose ranks have it."""

    def __init__(self, op: str, n: int, h: int, v: int, active: float = 1.0):
        self.op, self.n, self.h, self.v, self.active = op, n, h, v, active
        self.logical: list[dict[str, object]] = []

    @property
    def key(self) -> tuple:
        return (self.op, self.n, self.h, self.v, self.active)

    @property
    def flop(self) -> float:
        return 2.0 * self.n * self.h * self.v * (4 if self.op == "sweep_forward_backward" else 1)


def points() -> list[Point]:
    """Gradients first, then forward points with the smallest first and the heads in turn: an interrupted run has
    something of everything."""
    found: dict[tuple, Point] = {}
    for head, (h, v) in HEADS.items():
        logical = [("sweep_forward", tokens, tp, cp, 1.0) for tokens in TOKENS for tp, cp in LAYOUTS]
        logical += [("sweep_forward_backward", TOKENS[0], 4, 2, active) for active in ACTIVE]
        for op, tokens, tp, cp, active in logical:
            point = Point(op, tokens // cp, h, v // tp, active)
            point = found.setdefault(point.key, point)
            point.logical.append({"head": head, "tokens": tokens, "tp": tp, "cp": cp})
    return sorted(
        found.values(),
        key=lambda p: (p.op != "sweep_forward_backward", -p.active, p.n * (p.v // 1024) // 1024, p.h, p.v),
    )


class Data:
    """X ~ N(0, 1) and W ~ N(0, 1.5^2 / H) in bf16 for every shape, made once."""

    def __init__(self, largest: list[Point]):
        self.device = torch.device("cuda")
        self.generator = torch.Generator(self.device).manual_seed(1)
        self.x = self.normal(max(p.n * p.h for p in largest))
        self.w = {
            h: self.normal(max(p.v for p in largest if p.h == h), h).mul_(1.5 / h**0.5) for h in {p.h for p in largest}
        }
        self.product = torch.empty(max(p.n * p.v for p in largest), dtype=torch.bfloat16, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device, generator=self.generator)

    def warm(self) -> torch.Tensor:
        """1.4 ms of work that is not measured."""
        return torch.mm(self.x[: 1 << 26].view(8192, 8192), self.x[: 1 << 26].view(8192, 8192))

    def hidden(self, p: Point) -> torch.Tensor:
        return self.x[: p.n * p.h].view(p.n, p.h)

    def weight(self, p: Point) -> torch.Tensor:
        return self.w[p.h][: p.v]

    def targets(self, p: Point) -> torch.Tensor:
        return torch.randint(0, p.v, (p.n,), device=self.device, generator=self.generator)

    def mask(self, p: Point) -> torch.Tensor:
        """Sequences of GSM8K's lengths whose first part, the prompt, is inactive."""
        return torch.tensor(tile_skipping.mask("runs", p.n, p.active, "gsm8k_train"), device=self.device)


def forward_ways(p: Point, data: Data, skyrl, triton) -> dict[str, Callable[[], Results]]:
    x, w, ids = data.hidden(p), data.weight(p), data.targets(p)
    product = data.product[: p.n * p.v].view(p.n, p.v)
    batch, row_ids = x.unsqueeze(0), ids.unsqueeze(0)

    def logprob(way) -> Results:
        return (way.apply(batch, w, row_ids.clone(), 0, p.v, CHUNK, None, True)[0],)

    return {
        "ours": lambda: lmhead.linear_logprobs(x, w, ids, return_entropy=True, inference_only=True),
        "gemm": lambda: (torch.mm(x, w.t(), out=product),),
        "logprob_triton": lambda: logprob(triton.FusedLinearLogprobTriton),
        "logprob_torch": lambda: logprob(skyrl.FusedLinearChunkedDistributedLogprob),
        "entropy": lambda: (skyrl._fused_vocab_parallel_entropy_from_hidden(batch, w, None, CHUNK)[0],),
        "combined": lambda: triton.LinearCrossEntropy.apply(x, w, ids, 1.0, "none", None),
        "targets": lambda: (ids,),
    }


def gradient_ways(p: Point, data: Data, skyrl, triton, cache_bytes: int) -> dict[str, Callable[[], Results]]:
    """Results are logprob, entropy, dX, dW. Inactive rows have no upstream gradient; only `ours` can leave them out, and
    keep `cache_bytes` of exponentials for its backward."""
    x, w = data.hidden(p).detach().requires_grad_(), data.weight(p).detach().requires_grad_()
    ids, mask = data.targets(p), data.mask(p)
    a, g = (torch.randn(p.n, device=data.device, generator=data.generator) * mask for _ in range(2))
    g *= 0.1
    product = data.product[: p.n * p.v].view(p.n, p.v)

    def with_gradients(logprob: torch.Tensor, entropy: torch.Tensor) -> Results:
        gradients = torch.autograd.grad((logprob, entropy), (x, w), (a, g))
        return logprob.detach(), entropy.detach(), *gradients

    def two_passes(way) -> Results:
        logprob = way.apply(x.unsqueeze(0), w, ids.unsqueeze(0).clone(), 0, p.v, CHUNK, None, False)[0]
        return with_gradients(logprob, skyrl.vocab_parallel_entropy(F.linear(x, w), chunk_size=0))

    return {
        "ours": lambda: with_gradients(
            *lmhead.linear_logprobs(
                x,
                w,
                ids,
                return_entropy=True,
                entropy_requires_grad=True,
                active=None if p.active == 1 else mask,
                cache_bytes=cache_bytes,
            )
        ),
        "gemm": lambda: (torch.mm(x.detach(), w.detach().t(), out=product),),
        "two_pass_triton": lambda: two_passes(triton.FusedLinearLogprobTriton),
        "two_pass_torch": lambda: two_passes(skyrl.FusedLinearChunkedDistributedLogprob),
        "combined": lambda: with_gradients(*triton.LinearCrossEntropy.apply(x, w, ids, 1.0, "none", None)),
        "targets": lambda: (ids, mask, a, g),
    }


class Measured:
    """One way to compute a point: its first results, memory and times."""

    def __init__(self, run: Callable[[], Results]):
        self.run, self.error, self.ms = run, None, []
        self.first_results: Results | None = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            self.first_results = run()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot run a shape is part of the result
            self.error = f"{type(error).__name__}: {error}"[:300]
        self.first_call_ms = (time.perf_counter() - start) * 1e3
        held = sum(t.numel() * t.element_size() for t in self.first_results or ())
        self.extra_mib = max(0.0, torch.cuda.max_memory_allocated() - before - held) / 2**20


def take_turns(ways: dict[str, Measured], warm: Callable[[], object], seconds: float) -> None:
    """A round is queued whole behind some other work and waited for once, so that events do not time the host."""
    running = {name: way for name, way in ways.items() if way.error is None}
    done, rounds = 0, 2
    while done < rounds:
        start = time.perf_counter()
        events = {}
        warm()
        for name in list(running) if done % 2 == 0 else reversed(running):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            running[name].run()
            end.record()
            events[name] = (begin, end)
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            running[name].ms.append(begin.elapsed_time(end))
        done += 1
        if done == 1:
            rounds = max(2, min(15, math.ceil(seconds / (time.perf_counter() - start))))


def exact_rows(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """fp64 logits of some rows."""
    return torch.cat([x[rows].double() @ part.double().t() for part in w.split(16384)], dim=1)


def value_errors(p: Point, data: Data, ids: torch.Tensor, results: dict[str, Results]) -> dict[str, list[float]]:
    """Largest differences from fp64 over sampled rows."""
    rows = torch.linspace(0, p.n - 1, SAMPLED_ROWS, device=data.device).long()
    log_p = torch.log_softmax(exact_rows(data.hidden(p), data.weight(p), rows), dim=-1)
    logprob = log_p.gather(1, ids[rows, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    worst = {}
    for name, values in results.items():
        expected = {"entropy": (entropy,)}.get(name, (logprob, entropy))
        worst[name] = [float((v[rows].double() - e).abs().max()) for v, e in zip(values, expected)]
    return worst


def gradient_errors(p: Point, data: Data, given: Results, results: dict[str, Results]) -> dict[str, list[float]]:
    """Log-prob and entropy over all active rows; dX and dW relative Frobenius, on sampled rows."""
    ids, mask, a, g = given
    x, w = data.hidden(p), data.weight(p)
    rows, columns = (torch.linspace(0, size - 1, 64, device=data.device).long() for size in (p.n, p.v))
    logprob, entropy = (torch.empty(p.n, dtype=torch.float64, device=data.device) for _ in range(2))
    dx, dw = {}, torch.zeros(len(columns), p.h, dtype=torch.float64, device=data.device)
    for begin in range(0, p.n, 1024):
        part = torch.arange(begin, min(begin + 1024, p.n), device=data.device)
        log_p = torch.log_softmax(exact_rows(x, w, part), dim=-1)
        prob = log_p.exp()
        logprob[part] = log_p.gather(1, ids[part, None])[:, 0]
        entropy[part] = -(prob * log_p).sum(-1)
        dl = -a[part, None] * prob - g[part, None] * prob * (log_p + entropy[part, None])
        dl.scatter_add_(1, ids[part, None], a[part, None].double())
        dw += dl[:, columns].t() @ x[part].double()
        for row in rows[(rows >= begin) & (rows < begin + 1024)].tolist():
            dx[row] = sum(d.double() @ q.double() for d, q in zip(dl[row - begin].split(16384), w.split(16384)))
    exact_dx = torch.stack([dx[row] for row in rows.tolist()])
    worst = {}
    for name, values in results.items():
        values_errors = [
            float((v.double() - e)[mask].abs().max()) for v, e in zip(values, (logprob, entropy))
        ]
        pairs = ((values[2][rows], exact_dx), (values[3][columns], dw))
        worst[name] = values_errors + [float((got.double() - e).norm() / e.norm()) for got, e in pairs]
    return worst


def paired(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def way_record(way: Measured, errors: list[float], names: tuple[str, ...]) -> dict[str, object]:
    if way.error is not None:
        return {"error": way.error}
    record = {"ms": statistics.median(way.ms), "first_call_ms": way.first_call_ms, "extra_mib": way.extra_mib}
    return record | dict(zip(names, errors))


def measure(p: Point, data: Data, skyrl, triton, cache_bytes: int) -> dict[str, object]:
    gradients = p.op == "sweep_forward_backward"
    runs = gradient_ways(p, data, skyrl, triton, cache_bytes) if gradients else forward_ways(p, data, skyrl, triton)
    given = runs.pop("targets")()
    ways = {name: Measured(run) for name, run in runs.items()}
    if ways["ours"].error is not None:
        raise SystemExit(f"sweep: {p.key}: {ways['ours'].error}")
    backend = lmhead.last_backend()
    results = {name: way.first_results for name, way in ways.items() if name != "gemm" and way.error is None}
    errors = gradient_errors(p, data, given, results) if gradients else value_errors(p, data, given[0], results)
    results.clear()
    for way in ways.values():
        way.first_results = None
    take_turns(ways, data.warm, seconds=0.5)

    ours, unit = ways["ours"], ways["gemm"]
    names = ("logprob_err", "entropy_err", "dx_err", "dw_err")
    baselines = {
        name: way_record(way, errors.get(name, []), ("entropy_err",) if name == "entropy" else names)
        for name, way in ways.items()
        if name not in ("ours", "gemm")
    }
    passes = {}  # the two passes, turn by turn
    for backend_name in ("triton", "torch"):
        if gradients and ways[f"two_pass_{backend_name}"].error is None:
            passes[backend_name] = ways[f"two_pass_{backend_name}"].ms
        elif not gradients and ways[f"logprob_{backend_name}"].error is None and ways["entropy"].error is None:
            passes[backend_name] = [a + b for a, b in zip(ways[f"logprob_{backend_name}"].ms, ways["entropy"].ms)]
    faster = min(passes, key=lambda name: statistics.median(passes[name]), default=None)
    own = way_record(ours, errors["ours"], names)
    return {
        "op": p.op, "backend": backend, "n": p.n, "h": p.h, "v": p.v, "dtype": "bfloat16",
        "entropy": "grad" if gradients else "metric", "active": p.active, "pattern": "runs" if p.active < 1 else "dense",
        "ms": own["ms"], "gemm_ms": statistics.median(unit.ms), "units": paired(ours.ms, unit.ms), **own,
        "gemm_first_call_ms": unit.first_call_ms, "two_pass_logprob": faster,
        "two_pass_ms": statistics.median(passes[faster]) if faster else None,
        "speedup_two_pass": paired(passes[faster], ours.ms) if faster else None,
        "combined_ms": baselines["combined"].get("ms"),
        "speedup_combined": paired(ways["combined"].ms, ours.ms) if ways["combined"].error is None else None,
        "baselines": baselines, "rounds": len(ours.ms), "cache_bytes": cache_bytes if gradients else 0,
        "logical": p.logical,
    }  # fmt: skip


def times(record: dict[str, object], baseline: str) -> str:
    value = record[f"speedup_{baseline}"]
    return "no" if value is None else f"{value:.2f} x"


def summary(path: pathlib.Path) -> None:
    """Medians over logical points: a local shape counts once for each."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    forward = [r for r in records if r["op"] == "sweep_forward"]
    logical = [(point, r) for r in forward for point in r["logical"]]
    print(f"forward: {len(logical)} of 200 logical points, {len(forward)} of 104 local shapes")
    groups = [("all", logical)] + [(head, [(p, r) for p, r in logical if p["head"] == head]) for head in HEADS]
    for name, group in groups:
        line = f"  {name:15s}"
        for field in ("speedup_two_pass", "speedup_combined", "units"):
            values = sorted(r[field] for _, r in group if r[field] is not None)
            if values:
                line += f"  {field} {statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})"
        print(line)
    for r in records:
        if r["op"] == "sweep_forward_backward":
            print(
                f"forward + backward: {r['logical'][0]['head']} active {r['active']}: {r['ms']:.2f} ms, "
                f"{r['units']:.2f} units, {times(r, 'two_pass')} two passes, {times(r, 'combined')} combined"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to")
    parser.add_argument("--resume", action="store_true", help="leave out the points that --out has")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="end before this many seconds have passed")
    parser.add_argument("--op", choices=("sweep_forward", "sweep_forward_backward"), help="only this one")
    parser.add_argument("--active", type=float, help="only points with this fraction of active rows")
    parser.add_argument("--cache-bytes", type=int, default=0, help="of `ours` with gradients; one file a value")
    parser.add_argument("--most-gflop", type=float, default=math.inf, help="leave out larger points, for a trial")
    parser.add_argument("--commit", default="", help="recorded; default: git's")
    parser.add_argument("--summary", type=pathlib.Path, help="print the medians of a file and end")
    args = parser.parse_args()
    if args.summary is not None:
        return summary(args.summary)
    if args.out is None:
        parser.error("--out: expected a file")
    start = time.perf_counter()
    done = set()
    if args.resume and args.out.exists():
        for line in args.out.read_text().splitlines():
            r = json.loads(line)
            done.add((r["op"], r["n"], r["h"], r["v"], r["active"]))
    todo = [p for p in points() if p.key not in done and p.flop <= args.most_gflop * 1e9]
    todo = [p for p in todo if args.op in (None, p.op) and args.active in (None, p.active)]
    if not todo:
        return summary(args.out)
    skyrl, triton, skyrl_version = skyrl_peer.load()
    data = Data(todo)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    commit = args.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    environment = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "skyrl": skyrl_version,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip().split("\n")[0],
        "commit": commit or "unknown", "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    warm_until = time.perf_counter() + 2
    while time.perf_counter() < warm_until:
        data.warm()
        torch.cuda.synchronize()
    pace = 0.0  # seconds a FLOP of the last forward point
    with args.out.open("a") as file:
        for k, p in enumerate(todo):
            begin = time.perf_counter()
            if begin - start + pace * p.flop > args.budget_s:
                print(f"sweep: {len(todo) - k} points are left; run again with --resume", flush=True)
                break
            record = measure(p, data, skyrl, triton, args.cache_bytes) | environment
            file.write(json.dumps(record) + "\n")
            file.flush()
            seconds = time.perf_counter() - begin
            pace = 0.0 if p.op == "sweep_forward_backward" else seconds / p.flop
            print(
                f"{p.op} {p.n}x{p.h}x{p.v} active {p.active}: {record['ms']:.2f} ms {record['units']:.3f} units, "
                f"{times(record, 'two_pass')} two passes, {times(record, 'combined')} combined, {seconds:.1f} s",
                flush=True,
            )
    summary(args.out)


if __name__ == "__main__":
    main()
