"""What the adapters of Megatron-style trainers share: equal vocabulary shards, and zig-zag context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed
from ..layout import PackedLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def world_size(group: ProcessGroup | None) -> int:
    """Ranks of a group; None is no parallelism."""
    return 1 if group is None else dist.get_world_size(group)


def equal_shards(weight: Tensor, group: ProcessGroup | None) -> dict[str, Any]:
    """Options of lmhead.linear_logprobs for a weight cut into equal shards in rank order, as Megatron cuts it."""
    ranks = world_size(group)
    if ranks == 1:
        return {}
    rows = weight.shape[0]
    return {"group": group, "vocab_start": dist.get_rank(group) * rows, "vocab_size": ranks * rows}


def zigzag_layout(cu_seqlens: Tensor, cp_size: int) -> PackedLayout:
    """The packed layout of a host's padded offsets [S + 1], whose sequences are already multiples of 2 cp."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
    layout = PackedLayout(lengths, cp=cp_size)
    if layout.total != int(cu_seqlens[-1]):
        raise ValueError(
            f"cu_seqlens: expected sequences padded to a multiple of {2 * cp_size} (2 cp), got lengths {lengths}"
        )
    return layout


class _GatherContext(torch.autograd.Function):
    """[..., T / cp] of every rank -> [..., T] in packed order. The backward takes this rank's own part of the upstream
    gradient and sums nothing: every rank differentiates the same loss over all tokens."""

    @staticmethod
    def forward(ctx, local: Tensor, layout: PackedLayout, group: ProcessGroup) -> Tensor:
        ctx.layout, ctx.rank = layout, dist.get_rank(group)
        rows = local.reshape(-1, local.shape[-1]).T.contiguous()  # [T / cp, B]
        whole = layout.unshard(distributed.gather_rows("context", rows, group))
        return whole.T.reshape(*local.shape[:-1], layout.total)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _cut(gradient, ctx.layout, ctx.rank), None, None


def _cut(whole: Tensor, layout: PackedLayout, rank: int) -> Tensor:
    """[..., T] -> the part [..., T / cp] of one rank."""
    rows = whole.reshape(-1, whole.shape[-1]).T
    return layout.shard(rows, rank).T.reshape(*whole.shape[:-1], layout.local_total)


class ContextParallel:
    """Cuts token-aligned tensors [..., T] to this rank's part and gathers results. The identity without a group."""

    def __init__(self, cu_seqlens: Tensor, group: ProcessGroup | None):
        self._group = group
        self._layout = zigzag_layout(cu_seqlens, world_size(group)) if world_size(group) > 1 else None

    def local(self, whole: Tensor) -> Tensor:
        return whole if self._layout is None else _cut(whole, self._layout, dist.get_rank(self._group))

    def gather(self, local: Tensor) -> Tensor:
        return local if self._layout is None else _GatherContext.apply(local, self._layout, self._group)
