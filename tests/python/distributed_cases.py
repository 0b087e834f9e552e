"""What the ranks of test_distributed*.py run. Every function runs on all ranks of the world."""

from __future__ import annotations

import os
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


def masked_data(dtype: torch.dtype, beyond: bool) -> dict[str, Tensor]:
    """SkyRL's case of inactive rows: 3 x 192 rows of H 128 over V 256, 0..255 and 300..331 inactive."""
    d = {name: t.to(dtype) if name in ("x", "w") else t for name, t in data((3, 192), 128, 256).items()}
    if beyond:
        d["targets"].view(-1)[5::17] += 256
    mask = torch.ones(576, dtype=torch.bool)
    mask[:256] = mask[300:332] = False
    return d | {"mask": mask.view(3, 192)}


def masked(dtype: torch.dtype, beyond: bool) -> dict[str, Tensor] | None:
    """Two ranks; what inactive rows hold must not matter."""
    group = group_of(2)
    if group is None:
        return None
    d = masked_data(dtype, beyond)
    start, size = distributed.vocab_shard(256, dist.get_rank(), 2)
    x = d["x"].masked_fill(~d["mask"][..., None], torch.nan)
    return _step(
        d | {"targets": d["targets"].masked_fill(~d["mask"], -7)}, x, d["w"][start : start + size], active=d["mask"],
        out_of_vocab="zero", vocab_start=start, vocab_size=256, group=group, reduce_hidden_grad="sum",
    )  # fmt: skip


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


def grid(tp: int, cp: int) -> tuple[Any, Any] | None:
    """(tp_group, cp_group) of this rank in a grid of the first tp * cp ranks; None on the others."""
    rank, mine = dist.get_rank(), [None, None]
    for c in range(cp):
        members = [c * tp + t for t in range(tp)]
        group = dist.new_group(members)
        mine[0] = group if rank in members else mine[0]
    for t in range(tp):
        members = [c * tp + t for c in range(cp)]
        group = dist.new_group(members)
        mine[1] = group if rank in members else mine[1]
    return tuple(mine) if rank < tp * cp else None


def packed_data(lengths: tuple[int, ...], hidden: int, vocab: int) -> dict[str, Tensor]:
    tokens = sum(lengths)
    d = data((tokens,), hidden, vocab)
    generator = torch.Generator().manual_seed(tokens)
    d["ids"] = torch.randint(0, vocab, (tokens,), generator=generator)
    d["mask"] = torch.rand(tokens, generator=generator) < 0.7
    d["temperature"] = 0.5 + torch.rand(tokens, generator=generator)
    return d


def local_hidden(x: Tensor, layout: lmhead.PackedLayout, cp_group: Any, tp_group: Any, sequence_parallel: bool) -> Tensor:
    """This rank's rows; padding holds NaN, which may reach no result."""
    rows = layout.shard(layout.pad(x, float("nan")), dist.get_rank(cp_group))
    if sequence_parallel:
        rows = rows.chunk(dist.get_world_size(tp_group))[dist.get_rank(tp_group)]
    return rows.clone()


def packed(
    tp: int, cp: int, sequence_parallel: bool, lengths: tuple[int, ...], hidden: int, vocab: int, dtype: Any = torch.float32
) -> dict[str, Any] | None:
    groups = grid(tp, cp)
    if groups is None:
        return None
    tp_group, cp_group = groups
    d = packed_data(lengths, hidden, vocab)
    layout = lmhead.PackedLayout(lengths, tp=tp, cp=cp)
    x = local_hidden(d["x"].to(dtype), layout, cp_group, tp_group, sequence_parallel).requires_grad_()
    start, size = distributed.vocab_shard(vocab, dist.get_rank(tp_group), tp)
    w = d["w"][start : start + size].clone().requires_grad_()
    distributed.counts.clear()
    logprob, entropy = lmhead.packed_logprobs(
        x, w, d["ids"], torch.tensor(layout.cu_seqlens), tp_group=tp_group, cp_group=cp_group,
        sequence_parallel=sequence_parallel, loss_mask=d["mask"], temperature=d["temperature"], return_entropy=True,
        entropy_requires_grad=True, vocab_start=start, vocab_size=vocab,
        reduce_hidden_grad=None if sequence_parallel else "sum",
    )  # fmt: skip
    forward = dict(distributed.counts)
    distributed.counts.clear()
    (logprob * d["a"] + entropy * d["g"]).sum().backward()
    return {
        "logprob": logprob.detach(), "entropy": entropy.detach(), "dx": x.grad, "dw": w.grad, "forward": forward,
        "backward": dict(distributed.counts), "tp_rank": dist.get_rank(tp_group), "cp_rank": dist.get_rank(cp_group),
    }  # fmt: skip


def batch(tp: int, cp: int) -> dict[str, Any] | None:
    """A padded batch [B, S], left- and right-padded, through a layout made from its mask."""
    groups = grid(tp, cp)
    if groups is None:
        return None
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]])
    layout = lmhead.PackedLayout.from_attention_mask(mask, tp=tp, cp=cp)
    d = packed_data(tuple(layout.lengths), 8, 40)
    ids = torch.full(mask.shape, 7)
    ids[mask.bool()] = d["ids"]
    start, size = distributed.vocab_shard(40, dist.get_rank(groups[0]), tp)
    x = local_hidden(d["x"], layout, groups[1], groups[0], False)
    logprob = lmhead.packed_logprobs(
        x, d["w"][start : start + size], ids, None, layout=layout, tp_group=groups[0], cp_group=groups[1],
        vocab_start=start, vocab_size=40,
    )  # fmt: skip
    return {"logprob": logprob, "mask": mask, "data": d}


def metric(tp: int) -> dict[str, Any] | None:
    """Log-prob and gradients without an entropy and with a metric one."""
    group = group_of(tp)
    if group is None:
        return None
    d = data((16,), 32, 1032)
    start, size = distributed.vocab_shard(1032, dist.get_rank(), tp)
    out = []
    for options in ({}, {"return_entropy": True}):
        x, w = d["x"].clone().requires_grad_(), d["w"][start : start + size].clone().requires_grad_()
        result = lmhead.linear_logprobs(
            x, w, d["targets"], vocab_start=start, vocab_size=1032, group=group, reduce_hidden_grad="sum", **options
        )
        logprob = result[0] if options else result
        (logprob * d["a"]).sum().backward()
        out.append({"logprob": logprob.detach(), "dx": x.grad, "dw": w.grad})
    return {"off": out[0], "metric": out[1]}


def fault(kind: str) -> str:
    """The error of a call on three ranks in which rank 1 differs. The same group is used again afterwards."""
    group = group_of(3)
    if group is None:
        return ""
    d = data((5,), 8, 24)
    start, size = distributed.vocab_shard(24, dist.get_rank(), 3)
    good = {"vocab_start": start, "vocab_size": 24, "group": group}
    x, targets, options = d["x"], d["targets"], dict(good)
    if dist.get_rank() == 1:
        if kind == "target":
            targets = targets.clone()
            targets[3] = 24
        elif kind == "rows":
            x, targets = x[:4], targets[:4]
        elif kind == "options":
            options["temperature"] = 2.0
        elif kind == "flags":
            options["entropy_requires_grad"] = True
        elif kind == "dtype":
            targets = targets.float()
        elif kind == "numpy":
            x = x.detach().numpy()
        elif kind == "list":
            x = x.tolist()
    message, w = "no error", d["w"][start : start + size]
    ids = d["targets"].view(5, 1).int()
    odd = dist.get_rank() == 1
    try:
        if kind == "selected":
            lmhead.selected_logprobs(x, w, targets, ids, valid_vocab=24.0 if odd else 24, **options)
        elif kind == "support":
            lmhead.support_logprobs(x, w, ids, targets[:4] if odd else targets, **options)
        else:
            lmhead.linear_logprobs(x, w, targets, **options)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    lmhead.linear_logprobs(d["x"], d["w"][start : start + size], d["targets"], **good)
    return message


def packed_fault(kind: str) -> str:
    """The same over TP 2 x CP 2, where only the last rank differs, or only rows of the last CP rank are bad."""
    groups = grid(2, 2)
    if groups is None:
        return ""
    d = packed_data((9, 5), 8, 24)
    layout = lmhead.PackedLayout((9, 5), tp=2, cp=2)
    start, size = distributed.vocab_shard(24, dist.get_rank(groups[0]), 2)
    ids, last = d["ids"].clone(), dist.get_rank() == 3
    if kind == "target":
        ids[4] = 24  # predicted by a row of one CP rank
    if kind == "ids" and last:
        ids[1] = (ids[1] + 1) % 24
    masks = {"mask": torch.ones(3), "half mask": torch.ones(14, dtype=torch.bfloat16), "list": [1] * 14}
    rows = local_hidden(d["x"], layout, groups[1], groups[0], False), d["w"][start : start + size], ids, None
    options = dict(layout=layout, tp_group=groups[0], cp_group=groups[1], vocab_start=start, vocab_size=24)
    if last and kind in masks:
        options["loss_mask"] = masks[kind]
    try:
        if kind == "support":
            lmhead.packed_support_logprobs(*rows, ids.view(-1, 1).to(torch.int64 if last else torch.int32), **options)
        else:
            lmhead.packed_logprobs(*rows, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dead_rank() -> str:
    """Rank 1 is gone before the call."""
    if dist.get_rank() == 1:
        os._exit(9)
    d = data((5,), 8, 24)
    start, size = distributed.vocab_shard(24, dist.get_rank(), dist.get_world_size())
    try:
        lmhead.linear_logprobs(
            d["x"], d["w"][start : start + size], d["targets"], vocab_start=start, vocab_size=24, group=dist.group.WORLD
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def support_data(lengths: tuple[int, ...], k: int) -> dict[str, Tensor]:
    d = packed_data(lengths, HIDDEN, 512)
    tokens, generator = sum(lengths), torch.Generator().manual_seed(9)
    support = torch.randint(0, 512, (tokens, k), generator=generator, dtype=torch.int32)
    support[torch.rand(tokens, k, generator=generator) < 0.4] = -1
    d["support"] = support
    d["temperature"] = 0.5 + torch.rand(tokens, generator=generator)
    d["mask"] = torch.rand(tokens, generator=generator) < 0.8
    return d


def support(tp: int, cp: int, sequence_parallel: bool, lengths: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Candidate sets of packed sequences: this rank's results and gradients, hidden's mapped back to its tokens."""
    groups = grid(tp, cp)
    if groups is None:
        return None
    tp_group, cp_group = groups
    d = support_data(lengths, 6)
    tp_rank, cp_rank = dist.get_rank(tp_group), dist.get_rank(cp_group)
    layout = lmhead.PackedLayout(lengths, tp=tp, cp=cp)
    x = layout.shard(layout.pad(d["x"]), cp_rank)
    if sequence_parallel:
        x = x.chunk(tp)[tp_rank]
    start, size = distributed.vocab_shard(512, tp_rank, tp)
    x, w = x.clone().requires_grad_(), d["w"][start : start + size].clone().requires_grad_()
    logprob, entropy = lmhead.packed_support_logprobs(
        x, w, d["ids"], None, d["support"], layout=layout, tp_group=tp_group, cp_group=cp_group,
        sequence_parallel=sequence_parallel, loss_mask=d["mask"], temperature=d["temperature"],
        entropy_requires_grad=True, vocab_start=start, vocab_size=512,
    )  # fmt: skip
    (logprob * d["a"] + entropy * d["g"]).sum().backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "dx": x.grad, "dw": w.grad}
