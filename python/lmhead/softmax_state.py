"""`torch.library` operator `lmhead::softmax_state`: partial-softmax states, for callers that need more of the
distribution than log-prob and entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _core, _tensors


@torch.library.custom_op("lmhead::softmax_state", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    compute_dtype: torch.dtype | None,
) -> Tensor:
    options = {
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "compute_dtype": compute_dtype,
        "ignore_index": -(2**63),
        "out_of_vocab": "zero",
        "valid_vocab": None,
        "vocab_start": 0,
        "vocab_size": None,
        "entropy": "off",
        "workspace_bytes": 0,
        "check": None,
        "backend": "auto",
    }
    call = _tensors.Call(hidden, weight, bias, targets, None, None, options)
    with call.guard():
        state = torch.empty((call.hidden.shape[0], _tensors.STATE_WIDTH), dtype=call.result_dtype, device=call.device)
        call.reserve_workspace(_core.Operation.forward_partial)
        _core.forward_partial(call.problem, _tensors.output_matrix(state), call.execution)
    return state.view(*targets.shape, _tensors.STATE_WIDTH)


@_forward.register_fake
def _(hidden, weight, bias, targets, *options):
    return hidden.new_empty((*targets.shape, _tensors.STATE_WIDTH), dtype=_tensors.result_dtype(hidden))


def softmax_state(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial-softmax state [..., 4] of each row: the maximum m of z, sum 2^u, sum 2^u u with u = (z - m) log2 e, and z
    at the target (+inf if it is outside the vocabulary). No gradient."""
    if compute_dtype is None:
        compute_dtype = _checks.autocast_dtype(hidden)
    with torch.no_grad():
        return _forward(hidden, weight, bias, targets, temperature, softcap, logit_scale, compute_dtype)
