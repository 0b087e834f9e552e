"""Forward and forward + backward of a head spread over the GPUs of one host, against one GPU.

    torchrun --nproc-per-node 4 benchmarks/multi_gpu.py --tokens 16384 --hidden 4096 --vocab 131072          # TP 4
    torchrun --nproc-per-node 8 benchmarks/multi_gpu.py --cp 2 --entropy grad --sequence-parallel   # TP 4, CP 2

Rank 0 first times the whole problem alone (all tokens, all columns), then all ranks time theirs, in turns of one: clocks
drift together. Times are medians over CUDA events of the slowest rank. Values are compared before anything is timed, bit
for bit where shards are equal; gradients after the reduction. Appends JSON records (docs/measuring.md) to --out: op,
backend, tp, cp, transport, ms, one_gpu_ms, inverse_efficiency = ms * ranks / one_gpu_ms, errors. Runs on one GPU too, as
world size 1. NVLink multicast must be off where its driver support is missing: NCCL_NVLS_ENABLE=0 is set unless given.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lmhead
from lmhead import distributed


def problem(args: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """The same on every rank: X ~ N(0, 1), W ~ N(0, 1.5^2 / H), in bf16."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)

    ids = torch.randint(0, args.vocab, (args.tokens,), device=device, generator=generator)
    upstream = torch.randn(2, args.tokens, device=device, generator=generator)
    weight = normal(args.vocab, args.hidden, std=1.5 / args.hidden**0.5)
    return {"hidden": normal(args.tokens, args.hidden), "weight": weight, "ids": ids, "a": upstream[0], "g": upstream[1]}


class Work:
    """One way to run the problem: forward, and forward + backward."""

    def __init__(self, args, d, tp_group, cp_group):
        tp_rank, tp = distributed.rank_and_size(tp_group)
        cp_rank, cp = distributed.rank_and_size(cp_group)
        self.d, self.grad = d, args.entropy == "grad"
        start, size = distributed.vocab_shard(args.vocab, tp_rank, tp)
        self.weight = d["weight"][start : start + size].detach().clone().requires_grad_()
        self.options = {"return_entropy": args.entropy != "off", "entropy_requires_grad": self.grad}
        sharded = tp_group is not None
        if sharded:
            self.options |= {"vocab_start": start, "vocab_size": args.vocab}
        lengths = [args.tokens // args.sequences] * args.sequences
        self.layout = lmhead.PackedLayout(lengths, tp=tp, cp=cp)
        self.sequence_parallel = args.sequence_parallel and sharded
        rows = self.layout.shard(self.layout.pad(d["hidden"]), cp_rank)
        if self.sequence_parallel:
            rows = rows.chunk(tp)[tp_rank]
        self.hidden = rows.detach().clone().requires_grad_()
        self.groups = {"tp_group": tp_group, "cp_group": cp_group}
        self.reduce = "sum" if sharded and not self.sequence_parallel else None

    def forward(self):
        result = lmhead.packed_logprobs(
            self.hidden, self.weight, self.d["ids"], None, layout=self.layout, sequence_parallel=self.sequence_parallel,
            reduce_hidden_grad=self.reduce, **self.groups, **self.options,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result,)

    def forward_only(self):
        with torch.no_grad():
            return self.forward()

    def forward_backward(self):
        self.hidden.grad = self.weight.grad = None
        result = self.forward()
        loss = (result[0] * self.d["a"]).sum()
        if self.grad:
            loss = loss + (result[1] * self.d["g"]).sum()
        loss.backward()
        return result


def timed(function, reps: int) -> list[float]:
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def compare(args, many: Work, one: Work | None, tp_group, cp_group) -> dict[str, float]:
    """Largest differences from one GPU; every rank takes part, rank 0 has the answer."""
    results = [r.detach() for r in many.forward_backward()]
    dist.all_reduce(many.weight.grad, group=cp_group)  # dW over CP, as a trainer does
    dx, dw = many.hidden.grad, many.weight.grad
    if many.sequence_parallel:
        dx = distributed.gather_rows("check", dx, tp_group)
    dx = many.layout.unpad(many.layout.unshard(distributed.gather_rows("check", dx, cp_group)))
    if args.vocab % tp_group.size() == 0:
        dw = distributed.gather_rows("check", dw, tp_group)
    if one is None:
        return {}
    whole = [r.detach() for r in one.forward_backward()]
    equal = all(torch.equal(a, b) for a, b in zip(results, whole))
    errors = {"bits_equal": equal, "logprob_diff": float((results[0] - whole[0]).abs().max())}
    if len(results) > 1:
        errors["entropy_diff"] = float((results[1] - whole[1]).abs().max())
    errors |= {"dx_diff": relative(dx, one.hidden.grad), "dw_diff": relative(dw, one.weight.grad[: dw.shape[0]])}
    limit = 1e-5 + 2**-22 * float(whole[0].abs().max())
    if not (errors["logprob_diff"] <= limit and errors["dx_diff"] <= 1e-2 and errors["dw_diff"] <= 1e-2):
        raise SystemExit(f"multi_gpu: results differ from one GPU, nothing was timed: {errors}")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks; the others are tensor parallel")
    parser.add_argument("--entropy", choices=("off", "metric", "grad"), default="grad")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of equal length in the packed row")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to; default: print only")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=5), device_id=device)
    ranks = dist.get_world_size()
    if ranks % args.cp != 0 or args.tokens % args.sequences != 0:
        raise SystemExit("multi_gpu: expected --cp to divide the ranks and --sequences the tokens")
    mesh = init_device_mesh("cuda", (args.cp, ranks // args.cp), mesh_dim_names=("cp", "tp"))
    tp_group, cp_group = mesh["tp"].get_group(), mesh["cp"].get_group()
    data = problem(args, device)
    many = Work(args, data, tp_group, cp_group)
    one = Work(args, data, None, None) if dist.get_rank() == 0 else None
    errors = compare(args, many, one, tp_group, cp_group)

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for op in ("forward", "forward_backward"):
        run = "forward_only" if op == "forward" else op
        distributed.counts.clear()
        getattr(many, run)()
        made = dict(distributed.counts)
        alone, together = [], []
        for _ in range(args.reps + 3):
            if one is not None:
                alone += timed(getattr(one, run), 1)
            dist.barrier()
            slowest = torch.tensor(timed(getattr(many, run), 1), device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            together.append(float(slowest))
        if one is None:
            continue
        one_ms, ms = statistics.median(alone[3:]), statistics.median(together[3:])
        record = {
            "op": op, "backend": lmhead.last_backend(), "transport": "nccl", "n": args.tokens, "h": args.hidden,
            "v": args.vocab, "dtype": "bfloat16", "entropy": args.entropy, "tp": ranks // args.cp, "cp": args.cp,
            "sequence_parallel": many.sequence_parallel, "ms": ms, "one_gpu_ms": one_ms,
            "inverse_efficiency": ms * ranks / one_ms, "collectives": made, **errors,
            "device": torch.cuda.get_device_name(device), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "commit": commit, "command": " ".join(["torchrun", f"--nproc-per-node {ranks}", *sys.argv]),
        }  # fmt: skip
        print(json.dumps(record), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
