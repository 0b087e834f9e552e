"""Compares `lmhead score` with the plain way: logits in memory, log_softmax, entropy, in torch.

    python compare_torch.py --lmhead build/release/lmhead --out out

Reads OUT/batch.safetensors, OUT/model and OUT/scores.safetensors as make_batch.py and `lmhead score`
left them. Each way runs once more in a process of its own, for its time and its peak memory. Errors
are largest differences from fp64 arithmetic on the same inputs. Writes OUT/summary.json, prints a
table, and ends with exit code 1 if lmhead breaks its precision promise (docs/numerics.md).
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import time

import torch
from safetensors.torch import load_file, save

WAYS = {"torch_fp32": torch.float32, "torch_bf16": torch.bfloat16}


def load(out: pathlib.Path):
    """hidden [N, H], weight [V, H], targets [N] with -100 where a row scores nothing."""
    batch = load_file(out / "batch.safetensors")
    weight = load_file(out / "model" / "model.safetensors")["model.embed_tokens.weight"]
    targets = torch.full_like(batch["input_ids"], -100, dtype=torch.int64)
    cu_seqlens = batch["cu_seqlens"].tolist()
    for begin, end in zip(cu_seqlens, cu_seqlens[1:]):
        targets[begin : end - 1] = batch["input_ids"][begin + 1 : end]
    return batch["hidden"], weight, targets


def plain(hidden, weight, targets, softmax_dtype=torch.float32):
    """The plain way: logits [N, V] in memory, in the inputs' dtype."""
    scored = targets != -100
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight), -1, dtype=softmax_dtype)
    logprob = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(scored, logprob, 0), torch.where(scored, entropy, 0)


def exact(hidden, weight, targets, logits_dtype):
    """logprob, entropy in fp64, from logits in `logits_dtype`, by blocks of rows; and z_max, z_target."""
    wide = weight.to(logits_dtype)
    parts = []
    for begin in range(0, len(hidden), 256):
        z = (hidden[begin : begin + 256].to(logits_dtype) @ wide.T).double()
        y = targets[begin : begin + 256]
        log_p = torch.log_softmax(z, -1)
        z_target = z.gather(1, y.clamp(min=0)[:, None])[:, 0]
        logprob = log_p.gather(1, y.clamp(min=0)[:, None])[:, 0]
        parts.append((logprob, -(log_p.exp() * log_p).sum(-1), z.amax(-1), z_target))
    logprob, entropy, z_max, z_target = (torch.cat(p) for p in zip(*parts))
    scored = targets != -100
    return torch.where(scored, logprob, 0), torch.where(scored, entropy, 0), z_max, z_target


def run_way(way: str, out: pathlib.Path) -> None:
    """Body of the child process: times one way and writes its results."""
    hidden, weight, targets = load(out)
    dtype = WAYS[way]
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    start = time.perf_counter()
    with torch.no_grad():
        logprob, entropy = plain(hidden, weight, targets)
    seconds = time.perf_counter() - start
    results = {"logprob": logprob.float(), "entropy": entropy.float()}
    (out / f"{way}.safetensors").write_bytes(save(results))  # not save_file, whose files are for their owner alone
    print(json.dumps({"seconds": seconds}))


# Linux counts the memory of the process that forked into ru_maxrss of the new program, and this one is
# large with torch in it. So a bare Python starts the command, and reports the peak on its last line.
LAUNCHER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def measure(command: list[str]) -> tuple[str, float]:
    """Output of a command and the peak resident memory of its process in MiB."""
    process = subprocess.run([sys.executable, "-S", "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        raise SystemExit(f"compare_torch: failed: {' '.join(command)}")
    *lines, peak_kib = process.stdout.splitlines()
    return "\n".join(lines), int(peak_kib) / 1024


def largest(a, b) -> float:
    return (a.double() - b.double()).abs().max().item() if len(a) else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lmhead", default="build/release/lmhead", help="the lmhead command")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder that make_batch.py wrote")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        run_way(args.way, args.out)
        return 0

    batch, model, scores = (str(args.out / name) for name in ("batch.safetensors", "model", "scores.safetensors"))
    command = [args.lmhead, "score", batch, "--model", model, "--entropy", "--json", "--out", scores]
    text, peak = measure(command)
    own = json.loads(text.splitlines()[-1])
    ways = {"lmhead": {"seconds": own["seconds"], "peak_mib": peak}}
    idle = measure([sys.executable, "-c", "import torch, safetensors.torch"])[1]
    for way in WAYS:
        text, peak = measure([sys.executable, __file__, "--way", way, "--out", str(args.out)])
        ways[way] = {"seconds": json.loads(text)["seconds"], "peak_mib": peak}

    hidden, weight, targets = load(args.out)
    logprob, entropy, z_max, z_target = exact(hidden, weight, targets, torch.float64)
    floor_logprob, floor_entropy, _, _ = exact(hidden, weight, targets, torch.float32)
    results = {"lmhead": load_file(scores), **{way: load_file(args.out / f"{way}.safetensors") for way in WAYS}}
    for way, result in results.items():
        ways[way]["logprob_err"] = largest(result["logprob"], logprob)
        ways[way]["entropy_err"] = largest(result["entropy"], entropy)

    # The promise: 4 x the error of fp32 logits with an fp64 softmax, + 1e-6 + 2^-22 of the numbers at hand.
    def bound(floor_error, value):
        sizes = torch.stack([z_max.abs(), z_target.abs(), value.abs()]).amax(0)
        return 4 * floor_error + 1e-6 + 2.0**-22 * sizes

    kept = True
    for name, value, floor in (("logprob", logprob, floor_logprob), ("entropy", entropy, floor_entropy)):
        error = (results["lmhead"][name].double() - value).abs()
        kept &= bool((error <= bound(largest(floor, value), value)).all())

    scored = int((targets != -100).sum())
    summary = {
        "tokens": len(targets),
        "scored": scored,
        "vocab": weight.shape[0],
        "hidden": weight.shape[1],
        "mean_nll": -logprob.sum().item() / max(1, scored),
        "mean_entropy": entropy.sum().item() / max(1, scored),
        "within_bound": kept,
        "backend": own["backend"],
        "threads": own["threads"],
        "torch_threads": torch.get_num_threads(),
        "torch_idle_mib": idle,
        "logprob_diff_torch_fp32": largest(results["lmhead"]["logprob"], results["torch_fp32"]["logprob"]),
        "entropy_diff_torch_fp32": largest(results["lmhead"]["entropy"], results["torch_fp32"]["entropy"]),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "lmhead": own["version"],
        "command": " ".join(command),
        "ways": ways,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    print(f"\n{scored} of {len(targets)} tokens, vocabulary {weight.shape[0]}, backend {own['backend']}: "
          f"mean NLL {summary['mean_nll']:.3f}, mean entropy {summary['mean_entropy']:.3f} nats\n")
    print(f"{'':<24} {'seconds':>9} {'peak MiB':>9} {'logprob error':>14} {'entropy error':>14}")
    names = {"lmhead": "lmhead score", "torch_fp32": "torch, fp32 logits", "torch_bf16": "torch, bf16 logits"}
    for way, row in ways.items():
        print(f"{names[way]:<24} {row['seconds']:>9.3f} {row['peak_mib']:>9.0f} "
              f"{row['logprob_err']:>14.2e} {row['entropy_err']:>14.2e}")
    print(f"Errors: largest differences from fp64. Peak: the whole process, {idle:.0f} MiB of torch's is its import.")
    print(f"Precision promise: {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
