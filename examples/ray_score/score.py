"""Scores many batches on a Ray cluster: each worker loads the head once, each file gets its own result.

    python examples/ray_score/score.py BATCHES/*.safetensors --model MODEL.safetensors --out SCORES --workers 2
    python examples/ray_score/score.py ... --address auto          # on a running cluster, with shared storage

A batch has `hidden` [N, H], `input_ids` [N] and optionally `cu_seqlens` [S + 1], `loss_mask` [N], as for `lmhead score`.
SCORES/NAME.safetensors holds `logprob` [N] (0 in a sequence's last row) and `entropy` [N]. A result is written to a
temporary name and renamed, so one that exists is whole: after a kill, run the same command again and only the missing
files are scored. One JSON line a file on stdout; exit 1 if a file failed, the others are scored all the same.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import ray
import ray.data


class Scorer:
    """One worker: a process that holds the head."""

    def __init__(self, model: str, tensor: str | None, out: str, threads: int):
        import torch
        from safetensors import safe_open

        torch.set_num_threads(threads)
        with safe_open(model, "pt") as file:
            known = [n for n in ("lm_head.weight", "model.embed_tokens.weight") if n in file.keys()]
            if tensor is None and not known:
                raise ValueError(f"--tensor: expected the head's name, {model} has {', '.join(sorted(file.keys()))}")
            self.weight = file.get_tensor(tensor or known[0])
        self.out = pathlib.Path(out)

    def __call__(self, row: dict) -> dict:
        started = time.perf_counter()
        try:
            tokens, mean = self.score(pathlib.Path(row["path"]))
        except Exception as error:  # one bad file is no reason to lose the others
            return {"path": row["path"], "error": f"{type(error).__name__}: {error}", "tokens": 0, "mean_logprob": 0.0,
                    "seconds": 0.0, "worker": os.getpid()}  # fmt: skip
        return {"path": row["path"], "error": "", "tokens": tokens, "mean_logprob": mean,
                "seconds": time.perf_counter() - started, "worker": os.getpid()}  # fmt: skip

    def score(self, path: pathlib.Path) -> tuple[int, float]:
        import lmhead
        from safetensors.torch import load_file, save

        batch = load_file(path)
        ids = batch["input_ids"]
        cu_seqlens = batch["cu_seqlens"].tolist() if "cu_seqlens" in batch else [0, len(ids)]
        logprob, entropy = lmhead.packed_logprobs(
            batch["hidden"], self.weight, ids, cu_seqlens, loss_mask=batch.get("loss_mask"), return_entropy=True,
            inference_only=True,
        )  # fmt: skip
        final = self.out / path.name
        unfinished = final.with_name(f".{final.name}.{os.getpid()}")
        # Not save_file, whose files are for their owner alone.
        unfinished.write_bytes(save({"logprob": logprob, "entropy": entropy}))
        os.replace(unfinished, final)
        scored = logprob[logprob != 0]
        return len(scored), float(scored.mean()) if len(scored) else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", type=pathlib.Path, nargs="+", help=".safetensors batches, each by its own file name")
    parser.add_argument("--model", type=pathlib.Path, required=True, help=".safetensors file with the head")
    parser.add_argument("--tensor", help="name of the head's weight; default lm_head.weight, else the tied embedding")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the results, on shared storage")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with a copy of the head")
    parser.add_argument("--cpus", type=int, default=1, help="CPU cores of a worker")
    parser.add_argument("--address", help="a running cluster, such as auto; default: start one on this machine")
    args = parser.parse_args()
    names = [path.name for path in args.batches]
    if len(set(names)) != len(names):
        parser.error("batches: expected different file names (each names its result), got one twice")

    args.out.mkdir(parents=True, exist_ok=True)
    missing = [path.resolve() for path in args.batches if not (args.out / path.name).exists()]
    print(f"ray_score: {len(missing)} of {len(names)} files to score", file=sys.stderr)
    if not missing:
        return 0
    local = {} if args.address else {"num_cpus": args.workers * args.cpus, "include_dashboard": False}
    ray.init(address=args.address, log_to_driver=False, **local)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"path": str(path)} for path in missing], override_num_blocks=len(missing))
    scored = rows.map(
        Scorer,
        fn_constructor_args=(str(args.model.resolve()), args.tensor, str(args.out.resolve()), args.cpus),
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.cpus,
    )
    failed = 0
    for row in scored.iter_rows():
        failed += bool(row["error"])
        print(json.dumps(row), flush=True)
    ray.shutdown()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
