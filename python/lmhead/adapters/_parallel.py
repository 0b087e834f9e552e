"""What the adapters of Megatron-style trainers share: equal vocabulary shards, and zig-zag context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

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


def zigzag_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Positions [T / cp] in the packed batch of the tokens that one context-parallel rank holds, in its order.

    cu_seqlens [S + 1] are padded offsets: each sequence is cut into 2 cp equal chunks, and rank r holds chunks r and
    2 cp - 1 - r.
    """
    local = torch.arange(int(cu_seqlens[-1]) // cp_size, device=cu_seqlens.device)
    cu_local = cu_seqlens // cp_size
    sequence = torch.searchsorted(cu_local[1:].contiguous(), local, right=True)
    chunk = (cu_seqlens.diff() // (2 * cp_size))[sequence]
    offset = local - cu_local[sequence]
    second = 2 * cp_size - 1 - cp_rank
    within = torch.where(offset < chunk, cp_rank * chunk + offset, second * chunk + offset - chunk)
    return cu_seqlens[sequence] + within


class _GatherContext(torch.autograd.Function):
    """[..., T / cp] of every rank -> [..., T] in packed order. The backward takes this rank's own part of the upstream
    gradient and sums nothing: every rank differentiates the same loss over all tokens."""

    @staticmethod
    def forward(ctx, local: Tensor, cu_seqlens: Tensor, group: ProcessGroup) -> Tensor:
        ranks = dist.get_world_size(group)
        parts = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(parts, local.contiguous(), group=group)
        whole = local.new_empty(*local.shape[:-1], local.shape[-1] * ranks)
        for rank, part in enumerate(parts):
            whole[..., zigzag_positions(cu_seqlens, ranks, rank)] = part
        ctx.positions = zigzag_positions(cu_seqlens, ranks, dist.get_rank(group))
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[..., ctx.positions], None, None


class ContextParallel:
    """Cuts token-aligned tensors [..., T] to this rank's part and gathers results. The identity without a group."""

    def __init__(self, cu_seqlens: Tensor, group: ProcessGroup | None):
        self._cu_seqlens, self._group = cu_seqlens, group
        self._active = world_size(group) > 1
        if self._active:
            self._positions = zigzag_positions(cu_seqlens, dist.get_world_size(group), dist.get_rank(group))

    def local(self, whole: Tensor) -> Tensor:
        return whole[..., self._positions] if self._active else whole

    def gather(self, local: Tensor) -> Tensor:
        return _GatherContext.apply(local, self._cu_seqlens, self._group) if self._active else local
