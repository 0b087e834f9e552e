"""SkyRL (Megatron backend): the functions of `model_utils` that score tokens from hidden states.

Signatures and results are SkyRL's: the target is rolled here, the last position drops out, a target outside the
vocabulary has log-prob 0 and keeps the softmax part of its gradient, and the gradient of `hidden` is this rank's part
(SkyRL's output processor reduces it). Three keywords are added at the end. `return_entropy`, `entropy_requires_grad`:
(logprobs, entropy) then come from the same projection. `loss_mask` [B, num_actions]: only those tokens are scored.
Temperature divides finished logits in fp32; no scaled copy of the weight is made.

`chunk_size` and `fused_backend` are accepted and not needed: memory is bounded by lmhead's workspace at any length.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import linear_logprobs
from ._parallel import ContextParallel, equal_shards, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "action_entropy",
    "check_head",
    "entropy_options",
    "from_parallel_hidden_to_logprobs",
    "from_parallel_hidden_to_logprobs_packed_sequences",
    "fused_vocab_parallel_entropy_from_hidden",
    "install",
    "prediction_mask",
]

# SkyRL ignores no target id: any id outside the vocabulary, -100 too, is "out of vocabulary".
_NO_IGNORE_INDEX = -(2**63)


def _score(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: ProcessGroup | None, temperature: float, **options: Any
) -> tuple[Tensor, ...]:
    """(logprob,) or (logprob, entropy), under SkyRL's rules for targets."""
    result = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        ignore_index=_NO_IGNORE_INDEX,
        out_of_vocab="zero",
        **equal_shards(weight, group),
        **options,
    )
    return result if isinstance(result, tuple) else (result,)


def _check_shard(weight: Tensor, start: int, end: int, group: ProcessGroup | None) -> None:
    shard = equal_shards(weight, group).get("vocab_start", 0)
    if (start, end) != (shard, shard + weight.shape[0]):
        raise ValueError(
            f"vocab_start_index, vocab_end_index: expected ({shard}, {shard + weight.shape[0]}) for lm_head_weight "
            f"{list(weight.shape)} on this rank, got ({start}, {end})"
        )


def from_parallel_hidden_to_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
    return_entropy: bool = False,
    entropy_requires_grad: bool = False,
    loss_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs [B, S - 1] of the next tokens from hidden [B, S / CP, H] and lm_head_weight [V / TP, H].

    target [B, S] is unshifted. With return_entropy: (logprobs, entropy), both [B, S - 1]. With loss_mask: see
    prediction_mask; rows that it leaves out are 0 and cost nothing, forward or backward.
    """
    _check_shard(lm_head_weight, vocab_start_index, vocab_end_index, tp_group)
    length = target.shape[1]
    total = hidden.shape[1] * world_size(cp_group)
    if total < length:
        raise ValueError(f"hidden: expected at least {length} positions like target, got {total}")
    rolled = torch.nn.functional.pad(target.roll(shifts=-1, dims=-1), (0, total - length))
    # The last position and the padding have no next token: their rows are not computed.
    active = (torch.arange(total, device=target.device) < length - 1).expand(target.shape[0], total)
    if loss_mask is not None:
        mask = prediction_mask(loss_mask, target.shape[0], length, device=target.device)
        active = torch.nn.functional.pad(mask, (0, total - length + 1))
    parallel = ContextParallel(torch.tensor([0, total], device=target.device), cp_group)
    results = _score(
        hidden,
        lm_head_weight,
        parallel.local(rolled),
        tp_group,
        temperature,
        active=parallel.local(active),
        return_entropy=return_entropy,
        entropy_requires_grad=entropy_requires_grad,
        inference_only=inference_only,
    )
    results = tuple(parallel.gather(r)[:, : length - 1] for r in results)
    return results if return_entropy else results[0]


def from_parallel_hidden_to_logprobs_packed_sequences(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
    return_entropy: bool = False,
    entropy_requires_grad: bool = False,
    loss_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs [B, unpacked_seqlen - 1] in padded form from packed hidden [1, T / CP, H], target [1, T].

    With return_entropy: (logprobs, entropy). Positions that no packed token predicts, or that loss_mask (see
    prediction_mask) leaves out, are 0. Only rows that reach the result are computed.
    """
    _check_shard(lm_head_weight, vocab_start_index, vocab_end_index, group)
    hidden, target = hidden.squeeze(0), target.squeeze(0)
    cu_seqlens = cu_seqlens_padded.to(device=target.device, dtype=torch.int64)
    source = _source_positions(cu_seqlens, unpacked_seqlen, attention_mask, sub_seq_lengths)
    if loss_mask is not None:
        wanted = prediction_mask(loss_mask, source.shape[0], unpacked_seqlen, device=target.device)
        source = torch.where(wanted, source, -1)
    tokens = target.shape[0]
    # Each token predicts the next of its own sequence; the wrap-around at a sequence's end reaches no result.
    position = torch.arange(tokens, device=target.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True)
    following = torch.where(position + 1 < cu_seqlens[sequence + 1], position + 1, cu_seqlens[sequence])
    active = torch.zeros(tokens + 1, dtype=torch.bool, device=target.device)
    active[source.where(source >= 0, tokens)] = True  # one slot more collects the positions without a source
    parallel = ContextParallel(cu_seqlens, cp_group)
    results = _score(
        hidden,
        lm_head_weight,
        parallel.local(target[following]),
        group,
        temperature,
        active=parallel.local(active[:tokens]),
        return_entropy=return_entropy,
        entropy_requires_grad=entropy_requires_grad,
        inference_only=inference_only,
    )
    unpacked = tuple(torch.where(source >= 0, parallel.gather(r)[source.clamp_min(0)], 0.0) for r in results)
    return unpacked if return_entropy else unpacked[0]


def _source_positions(
    cu_seqlens: Tensor, unpacked_seqlen: int, attention_mask: Tensor | None, sub_seq_lengths: list[list[int]] | None
) -> Tensor:
    """For each place [B, unpacked_seqlen - 1] of the padded result the packed position that predicts it, or -1."""
    columns = torch.arange(unpacked_seqlen - 1, device=cu_seqlens.device)
    if sub_seq_lengths is not None:
        offsets = cu_seqlens.tolist()
        segments = sum(map(len, sub_seq_lengths))
        if segments != len(offsets) - 1:
            raise ValueError(
                f"sub_seq_lengths: expected {len(offsets) - 1} sub-sequences as in cu_seqlens_padded, got {segments}"
            )
        source = torch.full((len(sub_seq_lengths), max(unpacked_seqlen - 1, 0)), -1)
        segment = 0
        for row, lengths in enumerate(sub_seq_lengths):
            column = 0
            for length in lengths:
                end = min(column + max(int(length) - 1, 0), unpacked_seqlen - 1)
                if end > column:
                    source[row, column:end] = torch.arange(end - column) + offsets[segment]
                column += offsets[segment + 1] - offsets[segment]
                segment += 1
        return source.to(cu_seqlens.device)
    if attention_mask is not None:
        mask = attention_mask.to(device=cu_seqlens.device, dtype=torch.bool)
        ordinal = mask.cumsum(1)  # 1 at a row's first token
        predicts = mask[:, :-1] & (ordinal[:, :-1] < mask.sum(1, keepdim=True))
        return torch.where(predicts, cu_seqlens[:-1, None] + ordinal[:, :-1] - 1, -1)
    predicts = columns < cu_seqlens.diff()[:, None] - 1
    return torch.where(predicts, cu_seqlens[:-1, None] + columns, -1)


def fused_vocab_parallel_entropy_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: ProcessGroup | None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Entropy [B, S] as a metric, from a projection of its own: SkyRL's `_fused_vocab_parallel_entropy_from_hidden`.

    `return_entropy` of the functions above gives it beside the log-probs for nothing.
    """
    targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return _score(
        hidden, lm_head_weight, targets, tp_group, temperature, return_entropy=True, inference_only=True
    )[1]  # fmt: skip


def prediction_mask(
    loss_mask: Tensor,
    batch: int,
    length: int,
    *,
    device: torch.device | None = None,
    loss_name: str | None = None,
    per_token_outputs: bool = False,
) -> Tensor:
    """Which of the predictions [B, S - 1] a loss reads: loss_mask [B, num_actions] > 0 in the last num_actions of them,
    none before.

    loss_mask is bool or integer. A "cross_entropy" loss that also returns per-token outputs reads every row, so it must
    bring no mask: ValueError.
    """
    if loss_mask.is_floating_point() or loss_mask.is_complex():
        raise TypeError(f"loss_mask: expected bool or an integer type, got {loss_mask.dtype}")
    if loss_mask.dim() != 2 or loss_mask.shape[0] != batch:
        raise ValueError(f"loss_mask: expected [{batch}, num_actions], got {list(loss_mask.shape)}")
    if loss_mask.shape[1] > length - 1:
        raise ValueError(f"loss_mask: expected num_actions <= {length - 1} (S - 1), got {loss_mask.shape[1]}")
    if device is not None and loss_mask.device != device:
        raise ValueError(f"loss_mask: expected a tensor on {device} like target, got {loss_mask.device}")
    if loss_name == "cross_entropy" and per_token_outputs:
        raise ValueError(
            "loss_mask: expected none for cross_entropy with per-token outputs (rows without loss would be 0), got one"
        )
    return torch.nn.functional.pad(loss_mask > 0, (length - 1 - loss_mask.shape[1], 0))


def entropy_options(loss_name: str | None, use_entropy_loss: bool) -> dict[str, bool]:
    """The two entropy flags for a loss: an entropy for every RL loss, none for "cross_entropy"; differentiable if it is
    part of the loss."""
    wanted = loss_name != "cross_entropy"
    return {"return_entropy": wanted, "entropy_requires_grad": wanted and bool(use_entropy_loss)}


def action_entropy(entropy: Tensor, num_actions: int, loss_mask: Tensor | None) -> Tensor:
    """Mean of entropy [B, S - 1] over the response tokens: the metric and the term of the loss alike.

    loss_mask [B, num_actions] may be None. An empty mask gives 0.
    """
    actions = entropy[:, -num_actions:]
    if loss_mask is None:
        return actions.mean()
    return (actions * loss_mask).sum() / loss_mask.sum().clamp(min=1.0)


def check_head(model: Any) -> None:
    """NotImplementedError for a Megatron model whose logits are not hidden @ weight.T of its output layer."""
    config = model.config
    if _mxfp8_projection(config):
        raise NotImplementedError("model: expected an output projection in bf16, fp16 or fp32, got MXFP8")
    if getattr(config, "use_mup", False):
        raise NotImplementedError("model: expected unscaled logits, got MuP logit scaling")
    if "output_processor" in inspect.signature(model.forward).parameters:
        return
    if not any(base.__name__ == "HybridModel" for base in type(model).__mro__):
        raise NotImplementedError(
            f"model: expected a GPTModel with output_processor or a HybridModel, got {type(model).__name__}"
        )
    if getattr(config, "mtp_num_layers", None):
        raise NotImplementedError("model: expected a HybridModel without MTP layers, got one with them")


def _mxfp8_projection(config: Any) -> bool:
    megatron = sys.modules.get("megatron.core.fp8_utils")
    if megatron is not None and hasattr(megatron, "is_mxfp8_output_proj_active"):
        return megatron.is_mxfp8_output_proj_active(config)
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", None) == "mxfp8" and bool(
        getattr(config, "fp8_output_proj", False)
    )  # fmt: skip


# SkyRL's name -> ours.
_REPLACED = {
    "from_parallel_hidden_to_logprobs": from_parallel_hidden_to_logprobs,
    "from_parallel_hidden_to_logprobs_packed_sequences": from_parallel_hidden_to_logprobs_packed_sequences,
    "_fused_vocab_parallel_entropy_from_hidden": fused_vocab_parallel_entropy_from_hidden,
}


def install() -> list[str]:
    """Replaces SkyRL's fused scoring functions, in `model_utils` and wherever they were imported to.

    Returns the replaced names as "module.name". Needs `fused_lm_head_logprob: true` in SkyRL's configuration to be used.
    """
    import importlib

    host = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    originals = {name: getattr(importlib.import_module(host), name) for name in _REPLACED}
    replaced = []
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("skyrl.") or module is None:
            continue
        for name, ours in _REPLACED.items():
            if vars(module).get(name) is originals[name] and originals[name] is not ours:
                setattr(module, name, ours)
                replaced.append(f"{module_name}.{name}")
    return replaced
