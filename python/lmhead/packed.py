"""`lmhead.packed_logprobs`: packed sequences over tensor- and context-parallel ranks."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed, linear_logprobs
from ._arrays import integers
from .layout import PackedLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def packed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor | list[int] | None,
    *,
    layout: PackedLayout | None = None,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    reduce_hidden_grad: str | None = None,
    check: bool | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each next token of packed sequences, and optionally the entropy, whole on every rank.

    Ids are shifted inside each sequence, then ids, masks and temperatures are cut to this rank's rows by the layout;
    results come back in the original order. The same as `linear_logprobs` on all tokens on one rank.

    Args:
        hidden: [local_total, H] (or any shape of as many rows, such as [local_total, 1, H]): this rank's rows of the
            layout, zig-zag under context parallelism. With sequence_parallel its tp rank's equal share of them.
        weight: [V / tp, H], with vocab_start and vocab_size in the options when tp > 1.
        input_ids: [num_tokens], every sequence's ids without padding, the same on all ranks; or, with a layout made from
            a padded batch (`PackedLayout.from_attention_mask`), that batch [B, S].
        cu_seqlens: [S + 1] offsets of the sequences in input_ids; may be None with a layout.
        layout: default: `PackedLayout.from_cu_seqlens(cu_seqlens, tp=..., cp=...)`. Give one to set its precision,
            and to save deriving it in every call (reading cu_seqlens from a GPU waits for it).
        tp_group, cp_group: torch.distributed groups; None is one rank.
        sequence_parallel: hidden is gathered over tp_group here, and its gradient reduce-scattered.
        loss_mask: bool or integer, [num_tokens], or [B, S - 1] with a batch: rows that predict are scored where > 0.
        temperature: a number, or one per row in the shape of loss_mask.
        reduce_hidden_grad: None or "sum", as in `linear_logprobs`; with sequence_parallel it is a reduce-scatter.
        check, **options: as in `linear_logprobs`.

    Returns:
        logprob, or (logprob, entropy) with return_entropy: fp32 [num_tokens], or [B, S - 1] with a batch. Row i scores
        the next id of its sequence; a sequence's last row scores nothing and is 0.

    Collectives: hidden over tp_group with sequence_parallel, the states over tp_group, and one all-gather over cp_group
    with both outputs in it. The backward takes this rank's rows of the upstream gradients, which every rank has whole,
    and sums nothing over cp_group: the caller sums the weight's gradient over it.
    """
    tp, cp = distributed.rank_and_size(tp_group)[1], distributed.rank_and_size(cp_group)[1]
    device = distributed.device_of(hidden, weight, input_ids)
    checked = distributed.is_checked(check, device)
    extra = _fingerprint(input_ids, cu_seqlens, layout, loss_mask, sequence_parallel) if checked else 0
    with distributed.reporting(tp_group, check, device, context=cp_group, extra=extra):
        _check_tensors(hidden=hidden, input_ids=input_ids, loss_mask=loss_mask)
        layout = _layout(layout, cu_seqlens, tp, cp)
        rows = _Rows(layout, input_ids, distributed.rank_and_size(cp_group)[0])
        if sequence_parallel and reduce_hidden_grad not in (None, "reduce_scatter"):
            raise ValueError(f"reduce_hidden_grad: expected None with sequence_parallel, got {reduce_hidden_grad!r}")
        if not sequence_parallel and reduce_hidden_grad == "reduce_scatter":
            raise ValueError("reduce_hidden_grad: expected None or 'sum' without sequence_parallel, got 'reduce_scatter'")
        flat = hidden.reshape(-1, hidden.shape[-1])
        scattered = sequence_parallel and tp > 1
        expected = layout.local_total // (tp if scattered else 1)
        if flat.shape[0] != expected:
            raise ValueError(
                f"hidden: expected {expected} rows (this rank's part of {layout!r}), got {list(hidden.shape)}"
            )
        if isinstance(temperature, Tensor) and temperature.numel() > 1:
            temperature = rows.shard("temperature", temperature, 1)
        results = linear_logprobs(
            flat,
            weight,
            rows.targets(input_ids, ignore_index),
            active=rows.active(loss_mask, hidden.device),
            temperature=temperature,
            ignore_index=ignore_index,
            group=tp_group,
            reduce_hidden_grad="reduce_scatter" if scattered else reduce_hidden_grad,
            check=check,
            **options,
        )
    if isinstance(results, Tensor):
        return _Gather.apply(rows, cp_group, results)[0]
    return _Gather.apply(rows, cp_group, *results)


def _check_tensors(**named: Any) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor) and not (name == "loss_mask" and value is None):
            raise TypeError(f"{name}: expected torch.Tensor, got {type(value).__name__}")


def _layout(layout: PackedLayout | None, cu_seqlens: Any, tp: int, cp: int) -> PackedLayout:
    if layout is None:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: expected offsets [S + 1] or a layout, got None")
        return PackedLayout.from_cu_seqlens(cu_seqlens, tp=tp, cp=cp)
    if not isinstance(layout, PackedLayout):
        raise TypeError(f"layout: expected lmhead.PackedLayout, got {type(layout).__name__}")
    if (layout.tp, layout.cp) != (tp, cp):
        raise ValueError(f"layout: expected tp {tp} and cp {cp} as the groups have, got {layout!r}")
    if cu_seqlens is not None and tuple(integers("cu_seqlens", cu_seqlens).tolist()) != layout.cu_seqlens:
        raise ValueError("cu_seqlens: expected those of the layout, got others")
    return layout


def _fingerprint(*parts: Any) -> int:
    """Equal on all ranks of one batch."""
    digest = 0
    for part in parts:
        if isinstance(part, Tensor):
            # As bytes: NumPy does not know every dtype.
            part = (tuple(part.shape), part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, PackedLayout):
            part = (part.cu_seqlens, part.cu_seqlens_padded)
        digest = zlib.crc32(repr(part).encode(), digest)
    return digest << 2  # room for what the operator adds


class _Rows:
    """Token-aligned tensors cut to this rank's rows, and results brought back, through the layout's index maps."""

    def __init__(self, layout: PackedLayout, input_ids: Tensor, cp_rank: int):
        self.layout, self.cp_rank = layout, cp_rank
        self.batched = input_ids.dim() == 2
        if not self.batched and tuple(input_ids.shape) != (layout.num_tokens,):
            raise ValueError(
                f"input_ids: expected [{layout.num_tokens}], or a batch [B, S] with a layout made from it, "
                f"got {list(input_ids.shape)}"
            )

    def targets(self, input_ids: Tensor, ignore_index: int) -> Tensor:
        whole = self.layout.from_batch(input_ids) if self.batched else self.layout.pad(input_ids)
        return self.layout.shard(self.layout.shift_targets(whole, ignore_index), self.cp_rank)

    def shard(self, name: str, values: Tensor, fill: float) -> Tensor:
        """[num_tokens, ...] or [B, S - 1, ...] -> this rank's rows."""
        try:
            whole = self.layout.from_prediction_batch(values, fill) if self.batched else self.layout.pad(values, fill)
        except ValueError as error:
            raise ValueError(f"{name}{str(error).removeprefix('values')}") from None
        return self.layout.shard(whole, self.cp_rank)

    def active(self, loss_mask: Tensor | None, device: torch.device) -> Tensor:
        """Rows that predict, and that the mask asks for."""
        predicts = torch.from_numpy(self.layout.target_rows[self.layout.local_rows(self.cp_rank)] >= 0).to(device)
        if loss_mask is None:
            return predicts
        if loss_mask.is_floating_point() or loss_mask.is_complex():
            raise TypeError(f"loss_mask: expected bool or an integer type, got {loss_mask.dtype}")
        mask = self.shard("loss_mask", loss_mask, 0) > 0
        return mask & predicts

    def gather(self, local: Tensor, cp_group: ProcessGroup | None) -> Tensor:
        """Results [local_total, K] of every rank -> the original order [..., K]."""
        gathered = local if cp_group is None else distributed.gather_rows("context", local, cp_group)
        whole = self.layout.unshard(gathered)
        return self.layout.to_batch(whole) if self.batched else self.layout.unpad(whole)


class _Gather(torch.autograd.Function):
    """Both results in one message; the backward takes this rank's rows and sums nothing."""

    @staticmethod
    def forward(ctx: Any, rows: _Rows, cp_group: ProcessGroup | None, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        results = rows.gather(torch.stack(local, -1), cp_group).unbind(-1)
        results = tuple(r.contiguous() for r in results)
        ctx.mark_non_differentiable(*(r for r, x in zip(results, local) if not x.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cut = (None if g is None else ctx.rows.shard("gradient", g, 0) for g in gradients)
        return None, None, *cut
