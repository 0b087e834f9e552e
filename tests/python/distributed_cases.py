"""What the ranks of test_distributed*.py run. Every function runs on all ranks of the world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lmhead
from lmhead import distributed

ROWS, HIDDEN, VOCAB = (2, 64), 32, 4096  # SkyRL's own test: B2 S64 V4096


def data(rows: tuple[int, ...] = ROWS, hidden: int = HIDDEN, vocab: int = VOCAB) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(vocab + hidden)
    x = torch.randn(*rows, hidden, generator=generator)
    w = torch.randn(vocab, hidden, generator=generator) * 1.5 / hidden**0.5
    targets = torch.randint(0, vocab, rows, generator=generator)
    a, g = torch.randn(*rows, generator=generator), torch.randn(*rows, generator=generator)
    return {"x": x, "w": w, "targets": targets, "a": a, "g": g}


def _step(d: dict[str, Tensor], x: Tensor, w: Tensor, **options: Any) -> dict[str, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    logprob, entropy = lmhead.linear_logprobs(
        x, w, d["targets"], return_entropy=True, entropy_requires_grad=True, **options
    )
    (logprob * d["a"] + entropy * d["g"]).sum().backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "dx": x.grad, "dw": w.grad}


def whole() -> dict[str, Tensor]:
    d = data()
    return _step(d, d["x"], d["w"])


def group_of(size: int) -> dist.ProcessGroup | None:
    """The first `size` ranks; None on the others."""
    group = dist.new_group(list(range(size)))
    return group if dist.get_rank() < size else None


def shards(tp: int) -> dict[str, Any] | None:
    group = group_of(tp)
    if group is None:
        return None
    d = data()
    start, size = distributed.vocab_shard(VOCAB, dist.get_rank(), tp)
    options = {"vocab_start": start, "vocab_size": VOCAB, "group": group}
    w = d["w"][start : start + size]
    distributed.counts.clear()
    result = _step(d, d["x"], w, **options)
    result["counts"] = dict(distributed.counts)
    result["dx_sum"] = _step(d, d["x"], w, reduce_hidden_grad="sum", **options)["dx"]
    return result
