"""Scores the tokens of `make run` with the LM head spread over processes, and checks one training step.

    torchrun --nproc-per-node 4 examples/torchrun_score.py --out out            # tensor parallel 4
    torchrun --nproc-per-node 4 examples/torchrun_score.py --out out --cp 2     # tensor parallel 2, context parallel 2

Reads OUT/batch.safetensors and OUT/model, real SmolLM2 hidden states and its head, as `make run` left them. Every
rank holds its vocabulary shard and, with --cp, its zig-zag share of the rows. Rank 0 prints the mean log-prob and
entropy, the largest difference from one rank, and the collectives that were made.
"""

import argparse
import datetime
import os
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from safetensors import safe_open
from safetensors.torch import load_file

import lmhead
from lmhead import distributed


def groups(tp: int, cp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's tensor- and context-parallel groups; tp ranks are neighbours."""
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    return mesh["tp"].get_group(), mesh["cp"].get_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder that `make run` wrote")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks; the others are tensor parallel")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    if dist.get_world_size() % args.cp != 0:
        raise SystemExit(f"--cp: expected a divisor of {dist.get_world_size()} ranks, got {args.cp}")
    tp_group, cp_group = groups(dist.get_world_size() // args.cp, args.cp)
    tp, tp_rank = tp_group.size(), tp_group.rank()

    batch = load_file(args.out / "batch.safetensors")
    layout = lmhead.PackedLayout.from_cu_seqlens(batch["cu_seqlens"], tp=tp, cp=args.cp)
    hidden = layout.shard(layout.pad(batch["hidden"]), cp_group.rank()).requires_grad_()
    with safe_open(args.out / "model" / "model.safetensors", "pt") as model:
        rows = model.get_slice("model.embed_tokens.weight")
        vocab = rows.get_shape()[0]
        start, size = distributed.vocab_shard(vocab, tp_rank, tp)
        weight = rows[start : start + size].requires_grad_()  # only this shard is read

    logprob, entropy = lmhead.packed_logprobs(
        hidden, weight, batch["input_ids"], None, layout=layout, tp_group=tp_group, cp_group=cp_group,
        return_entropy=True, entropy_requires_grad=True, vocab_start=start, vocab_size=vocab, reduce_hidden_grad="sum",
    )  # fmt: skip
    made = dict(distributed.counts)
    (-logprob.sum() - 0.01 * entropy.sum()).backward()
    dist.all_reduce(weight.grad, group=cp_group)  # the trainer's part: dW over context (and data) parallel ranks

    if dist.get_rank() == 0:
        with safe_open(args.out / "model" / "model.safetensors", "pt") as model:
            whole = model.get_tensor("model.embed_tokens.weight")
        one, _ = lmhead.packed_logprobs(
            batch["hidden"], whole, batch["input_ids"], batch["cu_seqlens"], return_entropy=True, inference_only=True
        )
        scored = one != 0
        print(
            f"tp {tp}, cp {args.cp}: {int(scored.sum())} tokens, mean logprob {logprob[scored].mean():.6f}, mean entropy "
            f"{entropy[scored].mean():.6f}; largest difference from one rank {(logprob - one).abs().max():.3g}; "
            f"|dX| {hidden.grad.float().norm():.4f}, |dW| {weight.grad.float().norm():.4f}; collectives {made}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
