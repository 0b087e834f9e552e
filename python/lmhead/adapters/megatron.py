"""Megatron-LM style output layers: sequence-first hidden states, vocabulary shards, `main_grad`, sequence parallelism.

    from lmhead.adapters.megatron import output_layer_logprobs
    logprobs = output_layer_logprobs(model.output_layer, hidden, labels)          # instead of logits and their loss

What the parallel output layer would do to gradients is done here: the gradient of hidden is summed over the
tensor-parallel group (reduce-scattered under sequence parallelism), and with `gradient_accumulation_fusion` the
weight's goes into `weight.main_grad` in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import linear_logprobs
from ._parallel import equal_shards, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["output_layer_logprobs", "vocab_parallel_logprobs"]


class _WithMainGrad(torch.autograd.Function):
    """The weight, with Megatron's protocol for a gradient that is already in main_grad.

    Megatron's data-parallel hooks expect a gradient tensor even then. The one they get is a single zero, expanded: it is
    never added (grad_added_to_main_grad).
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return gradient
        weight.grad_added_to_main_grad = True
        return weight.new_zeros(1).expand(weight.shape)


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs [B, S] of labels [B, S] (already shifted, as Megatron's are) from hidden [S, B, H].

    Args:
        hidden: [S, B, H]; [S / TP, B, H], this rank's part of the sequence, with sequence_parallel.
        weight: [V / TP, H], this rank's equal shard of the vocabulary.
        labels: [B, S] global ids, the same on every rank of the group.
        tp_group: tensor-parallel group.
        sequence_parallel: hidden is sharded along the sequence; it is gathered here, and its gradient scattered.
        gradient_accumulation_fusion: add the weight's gradient to weight.main_grad.
        **options: of lmhead.linear_logprobs; masks and temperatures are [B, S] like labels.

    Returns:
        logprob [B, S] fp32, or (logprob, entropy) with return_entropy.
    """
    ranks = world_size(tp_group)
    if ranks > 1:
        options.update(equal_shards(weight, tp_group))
        options["reduce_hidden_grad"] = "reduce_scatter" if sequence_parallel else "sum"
    for name in ("active", "temperature"):  # a row of hidden is (s, b)
        value = options.get(name)
        if isinstance(value, Tensor) and value.dim() == 2:
            options[name] = value.T
    if gradient_accumulation_fusion:
        if getattr(weight, "main_grad", None) is None:
            raise ValueError("weight: expected main_grad with gradient_accumulation_fusion, got a weight without it")
        options["weight_main_grad"] = weight.main_grad
        weight = _WithMainGrad.apply(weight)
    result = linear_logprobs(hidden, weight, labels.T, **options)
    return (result[0].T, result[1].T) if isinstance(result, tuple) else result.T


def output_layer_logprobs(
    output_layer: Any, hidden: Tensor, labels: Tensor, *, output_weight: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """vocab_parallel_logprobs with weight, bias, group and flags of a Megatron ColumnParallelLinear.

    output_weight: the shared embedding of a tied model, as Megatron passes it; default output_layer.weight.
    """
    if getattr(output_layer, "gather_output", False):
        raise NotImplementedError("output_layer: expected gather_output=False, got True")
    return vocab_parallel_logprobs(
        hidden,
        output_layer.weight if output_weight is None else output_weight,
        labels,
        bias=output_layer.bias,
        tp_group=getattr(output_layer, "tp_group", None),
        sequence_parallel=getattr(output_layer, "sequence_parallel", False),
        gradient_accumulation_fusion=getattr(output_layer, "gradient_accumulation_fusion", False),
        **options,
    )
