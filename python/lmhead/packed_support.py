"""`lmhead.packed_support_logprobs`: candidate sets of packed sequences over tensor- and context-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed
from .layout import PackedLayout
from .packed import _check_tensors, _Gather, _layout, _Rows
from .support import _second_in_trajectory, support_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _GatherHidden(torch.autograd.Function):
    """Rows of all tensor-parallel ranks; the backward sums the ranks' parts and keeps this rank's rows."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return distributed.gather_rows("hidden", shard.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.float() if gradient.dtype != torch.float64 else gradient
        return distributed.reduce_hidden_grad(part, "reduce_scatter", ctx.group).to(gradient.dtype), None


def packed_support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor | list[int] | None,
    support_ids: Tensor,
    *,
    layout: PackedLayout | None = None,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    empty_support: str = "zero",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`support_logprobs` of each next token of packed sequences, whole on every rank.

    Args:
        hidden, weight, input_ids, cu_seqlens, layout, tp_group, cp_group, sequence_parallel, loss_mask, temperature:
            as in `packed_logprobs`.
        support_ids: [num_tokens, K] int32 padded with -1, or [B, S - 1, K] with a batch: the set from which the token
            after row i was drawn. The same on all ranks.
        empty_support: as in `support_logprobs`. With "full" each sequence is a trajectory: a second loss-active row
            without candidates in one sequence is a ValueError.
        **options: as in `support_logprobs`.

    Returns:
        (logprob, entropy) fp32 [num_tokens], or [B, S - 1] with a batch; a row that predicts nothing, is masked, or has
        no candidate is 0, 0. The hidden gradient is this tensor-parallel rank's part, except with sequence_parallel.
    """
    tp, cp = distributed.rank_and_size(tp_group)[1], distributed.rank_and_size(cp_group)[1]
    scattered = sequence_parallel and tp > 1
    # What fails before the rows of hidden are gathered cannot be told in a header: the others are in that gather.
    groups = (None, None) if scattered else (tp_group, cp_group)
    device = distributed.device_of(hidden, weight, input_ids)
    with distributed.reporting(groups[0], options.get("check"), device, context=groups[1]):
        _check_tensors(hidden=hidden, input_ids=input_ids, support_ids=support_ids, loss_mask=loss_mask)
        layout = _layout(layout, cu_seqlens, tp, cp)
        rows = _Rows(layout, input_ids, distributed.rank_and_size(cp_group)[0])
        flat = hidden.reshape(-1, hidden.shape[-1])
        if scattered:
            flat = _GatherHidden.apply(flat, tp_group)
        if flat.shape[0] != layout.local_total:
            raise ValueError(
                f"hidden: expected {layout.local_total // (tp if sequence_parallel else 1)} rows (this rank's part of "
                f"{layout!r}), got {list(hidden.shape)}"
            )
        if support_ids.dtype != torch.int32:
            raise TypeError(f"support_ids: expected int32, got {str(support_ids.dtype).removeprefix('torch.')}")
        active = rows.active(loss_mask, hidden.device)
        local_support = rows.shard("support_ids", support_ids, -1)
        if empty_support == "full":
            _check_trajectories(layout, rows, support_ids, loss_mask)
        if isinstance(temperature, Tensor) and temperature.numel() > 1:
            temperature = rows.shard("temperature", temperature, 1)
        results = support_logprobs(
            flat,
            weight,
            local_support,
            rows.targets(input_ids, ignore_index),
            active=active,
            temperature=temperature,
            ignore_index=ignore_index,
            group=tp_group,
            empty_support=empty_support,
            **options,
        )
    return _Gather.apply(rows, cp_group, *results[:2])


def _check_trajectories(
    layout: PackedLayout, rows: _Rows, support_ids: Tensor, loss_mask: Tensor | None
) -> None:
    """Over whole sequences, which context parallelism spreads over ranks; support and masks are whole everywhere."""
    def padded(values: Tensor, fill: float) -> Tensor:
        return layout.from_prediction_batch(values, fill) if rows.batched else layout.pad(values, fill)

    empty = (padded(support_ids, -1) < 0).all(-1) & torch.from_numpy(layout.target_rows >= 0).to(support_ids.device)
    if loss_mask is not None:
        empty &= padded(loss_mask, 0) > 0
    offsets = torch.tensor(layout.cu_seqlens_padded, device=support_ids.device)
    sequence = torch.bucketize(torch.arange(empty.shape[0], device=support_ids.device), offsets[1:], right=True)
    _second_in_trajectory(empty, sequence)
