"""TRL: its chunked log-prob function, and through it every trainer that uses `add_fused_lm_head`.

    from lmhead.adapters.trl import ChunkedLogProbFunction    # trl.kernels.ChunkedLogProbFunction's `apply`
    lmhead.adapters.trl.install()                             # or replace it inside trl

The products run in the autocast type, else in the type of `hidden`, as in TRL; logits stay fp32 on every device.
`chunk_size` is accepted and not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import linear_logprobs
from ..softmax_state import softmax_state

__all__ = ["OPTIONAL_OUTPUTS", "ChunkedLogProbFunction", "chunked_logprob", "install"]

#: What can be asked for beside the log-probs. "entropy" is free. "mean_logits" costs a matrix-vector product,
#: "log_sum_sq_probs" and "is_top1" one projection each.
OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def chunked_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int | None = None,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N]; None for those not in `outputs`.

    hidden [N, H], weight [V, H], bias [V] or None, targets [N] in [0, V). logprobs and entropy are differentiable.
    """
    if hasattr(weight, "ds_id") and weight.requires_grad:
        raise NotImplementedError(
            "weight: expected a parameter that stays gathered until the backward, got one of DeepSpeed ZeRO-3"
        )
    options = {"bias": bias, "softcap": final_logit_softcapping, "logit_scale": logit_scale}
    # Under autocast its type decides, otherwise that of hidden.
    if not torch.is_autocast_enabled(hidden.device.type):
        options["compute_dtype"] = hidden.dtype
    wants_entropy = "entropy" in outputs
    result = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        return_entropy=wants_entropy,
        entropy_requires_grad=wants_entropy,
        **options,
    )
    logprobs, entropy = result if wants_entropy else (result, None)
    log_sum_sq_probs = mean_logits = is_top1 = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            # log sum p^2 = lse(2 z) - 2 lse(z), and 2 z are the logits at half the temperature.
            doubled = linear_logprobs(hidden, weight, targets, temperature=temperature / 2, inference_only=True, **options)
            log_sum_sq_probs = 2 * logprobs - doubled
        if "mean_logits" in outputs:
            mean_logits = _mean_logits(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
        if "is_top1" in outputs:
            state = softmax_state(hidden, weight, targets, temperature=temperature, **options)
            is_top1 = state[..., 3] >= state[..., 0]  # the target's logit against the row's maximum
    return logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1


def _mean_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, logit_scale: float
) -> Tensor:
    """The mean commutes with the projection, but not with a softcap."""
    if softcap is not None:
        raise NotImplementedError('outputs: expected no "mean_logits" with final_logit_softcapping, got both')
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        if bias is not None:
            mean = mean + bias.float().mean()
        return mean * (logit_scale / temperature)


class ChunkedLogProbFunction:
    """Stands in for TRL's autograd function of this name, which is used through `apply`."""

    apply = staticmethod(chunked_logprob)


def install() -> list[str]:
    """Makes TRL's fused heads use lmhead. Returns the replaced names as "module.name"."""
    import trl.kernels
    import trl.trainer.utils

    trl.kernels.ChunkedLogProbFunction = ChunkedLogProbFunction
    trl.trainer.utils._ChunkedLogProbFunction = ChunkedLogProbFunction
    return ["trl.kernels.ChunkedLogProbFunction", "trl.trainer.utils._ChunkedLogProbFunction"]
