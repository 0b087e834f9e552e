"""Log-probabilities over each row's own candidate set: the distribution that top-k / top-p sampling draws from.

    lmhead::support_logprobs            forward: (logprob, entropy, lse, valid)
    lmhead::support_logprobs_backward   (hidden, weight, bias) gradients
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks, _core, _options, _reported, _tensors, distributed

EMPTY_SUPPORT = ("zero", "full", "error")

# As torch_ops._OPTIONS: plain values in the order of the operator's schema.
_OPTIONS = (
    "temperature", "softcap", "logit_scale", "ignore_index", "valid_vocab", "vocab_start", "vocab_size",
    "entropy", "compute_dtype", "workspace_bytes", "check", "backend", "group",
)  # fmt: skip


class _SupportCall(_tensors.Call):
    """A _tensors.Call with its candidate ids."""

    def __init__(self, hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, options):
        super().__init__(
            hidden, weight, bias, sampled_ids, active, row_temperature, {**options, "out_of_vocab": "error"}
        )
        self.support_ids = support_ids.reshape(-1, support_ids.shape[-1]) if support_ids.numel() else support_ids.new_empty(
            (self.hidden.shape[0], support_ids.shape[-1])
        )
        if self.support_ids.stride(1) != 1 or self.support_ids.stride(0) < self.support_ids.shape[1]:
            self.support_ids = self.support_ids.contiguous()
        self.support = _core.SupportProblem()
        self.support.head = self.problem
        self.support.support_ids = _tensors.matrix("support_ids", self.support_ids)

    def reserve(self, operation: _core.Operation, gradients: _core.BackwardOutputs | None = None) -> None:
        size = _core.support_workspace_size(
            self.support, operation, gradients or _core.BackwardOutputs(), self.execution
        )
        self.set_workspace(size)


@torch.library.custom_op("lmhead::support_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled_ids: Tensor,
    support_ids: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int,
    check: bool | None,
    backend: str,
    group: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    with distributed.reporting(group, check, hidden.device):
        call = _SupportCall(hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, options)
        n = call.hidden.shape[0]
        with call.guard():
            logprob, entropies, lse = call.results(sampled_ids.shape)
            valid = torch.empty(sampled_ids.shape, dtype=torch.bool, device=call.device)
            outputs = _core.SupportOutputs()
            outputs.logprob, outputs.entropy, outputs.lse, outputs.valid = (
                _tensors.output_vector(result.view(-1)) for result in (logprob, entropies, lse, valid)
            )
            rank, ranks = distributed.rank_and_size(group)
            call.reserve(_core.Operation.forward if group is None else _core.Operation.forward_partial)
    with call.guard():
        if distributed.is_checked(check, call.device):
            distributed.settle(call, "support_logprobs", group, extra=call.support_ids.shape[1])
        if group is None:
            _core.support_forward(call.support, outputs, call.execution)
        else:
            states = torch.empty((ranks * n, _tensors.STATE_WIDTH), dtype=call.result_dtype, device=call.device)
            state = states[rank * n : (rank + 1) * n]
            _core.support_forward_partial(call.support, _tensors.output_matrix(state), call.execution)
            distributed.gather_rows("state", state, group, states)
            _core.support_combine(call.support, _tensors.matrix("states", states), outputs, call.execution)
    return logprob, entropies, lse, valid


@_forward.register_fake
def _(hidden, weight, bias, sampled_ids, *_):
    result = _tensors.result_dtype(hidden)
    return (
        *(hidden.new_empty(sampled_ids.shape, dtype=result) for _ in range(3)),
        hidden.new_empty(sampled_ids.shape, dtype=torch.bool),
    )


@torch.library.custom_op("lmhead::support_logprobs_backward", mutates_args=())
def _backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled_ids: Tensor,
    support_ids: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int,
    check: bool | None,
    backend: str,
    group: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    call = _SupportCall(hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, options)
    with call.guard():
        dx = _tensors.gradient_like(hidden, need_hidden, hidden)
        dw = _tensors.gradient_like(weight, need_weight, hidden)
        db = _tensors.gradient_like(bias, need_bias, hidden)
        held = {  # alive until the call is queued
            "lse": lse.reshape(-1),
            "entropy": None if dentropy is None else entropies.reshape(-1),
            "dlogprob": _tensors.upstream(dlogprob, call),
            "dentropy": _tensors.upstream(dentropy, call),
        }
        inputs = _core.BackwardInputs()
        for name, vector in held.items():
            if vector is not None:
                setattr(inputs, name, _tensors.vector(name, vector))
        outputs = _core.BackwardOutputs()
        if need_hidden:
            outputs.hidden = _tensors.output_matrix(dx.view(-1, hidden.shape[-1]) if dx.numel() else _tensors.rows(dx))
        if need_weight:
            outputs.weight = _tensors.output_matrix(dw)
        if need_bias:
            outputs.bias = _tensors.output_vector(db)
        call.reserve(_core.Operation.backward, outputs)
        _core.support_backward(call.support, inputs, outputs, call.execution)
    return dx, dw, db


@_backward.register_fake
def _(dlogprob, dentropy, hidden, weight, bias, *rest):
    need_hidden, need_weight, need_bias = rest[6:9]
    return (
        _tensors.gradient_like(hidden, need_hidden, hidden),
        _tensors.gradient_like(weight, need_weight, hidden),
        _tensors.gradient_like(bias, need_bias, hidden),
    )


def _setup_context(ctx, inputs, output):
    hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, *options = inputs
    _, entropies, lse, valid = output
    ctx.options = tuple(options)
    ctx.differentiable_entropy = options[_OPTIONS.index("entropy")] == "grad"
    ctx.mark_non_differentiable(*((lse, valid) if ctx.differentiable_entropy else (entropies, lse, valid)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, lse, entropies)


def _autograd_backward(ctx, dlogprob, dentropy, dlse, dvalid):
    if not ctx.differentiable_entropy:
        dentropy = None
    gradients = [None] * len(ctx.needs_input_grad)
    if dlogprob is None and dentropy is None:
        return tuple(gradients)
    needs = ctx.needs_input_grad[:3]
    results = _backward(dlogprob, dentropy, *ctx.saved_tensors, *needs, *ctx.options)
    gradients[:3] = [g if needed else None for g, needed in zip(results, needs)]
    return tuple(gradients)


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward.register_autograd(_tensors.no_double_backward, setup_context=lambda ctx, inputs, output: None)


def _second_in_trajectory(rows: Tensor, trajectory_ids: Tensor) -> None:
    ids, counts = trajectory_ids[rows].unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(
            "support_ids: expected at most one loss-active row without a candidate in a trajectory (its appended "
            f"end-of-sequence token), got {int(counts.max())} in trajectory {int(ids[counts.argmax()])}"
        )


@_reported
def support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    support_ids: Tensor,
    sampled_ids: Tensor,
    *,
    bias: Tensor | None = None,
    return_valid: bool = False,
    entropy_requires_grad: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    active: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: Any = None,
    empty_support: str = "zero",
    trajectory_ids: Tensor | None = None,
    workspace_bytes: int | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each sampled id, and entropy, under the softmax over that row's candidate ids alone.

    A rollout engine with top-k or top-p sampling renormalises over the tokens it kept; scoring the same sets makes
    the trainer's ratio compare like with like. Only the listed rows of the weight are read. Equal to

        z = logits (as in linear_logprobs, temperature included), with -inf outside the row's set
        lse = logsumexp(z);  logprob = z_sampled - lse (scored even when it is not in the set);  entropy of softmax(z)

    Args:
        hidden, weight, bias, temperature, softcap, logit_scale, valid_vocab, active, vocab_start, vocab_size, group,
            workspace_bytes, check: as for linear_logprobs. All products and sums are fp32.
        support_ids: [..., K] int32, padded anywhere with -1; a repeated id counts once.
        sampled_ids: [...] int32 or int64, or ignore_index (an inactive row).
        return_valid: also return which rows are active and have a candidate.
        entropy_requires_grad: make the entropy differentiable in the same backward.
        empty_support: what an active row without candidates gets: "zero": logprob 0, entropy 0; "full": it is
            scored over the whole vocabulary, with entropy 0 (a token that was appended, not sampled);
            "error": ValueError. "error" reads a flag from the device.
        trajectory_ids: [...] integer, with empty_support="full": two such rows in one trajectory are a ValueError
            (reads from the device).
        backend: "auto", "cpu" or "cuda_portable", for the candidates; the whole vocabulary of empty_support="full" is
            left to "auto".

    Returns:
        (logprob [...], entropy [...]) fp32 in nats (fp64 for fp64 inputs), with return_valid also valid [...] bool.
        Invalid rows are 0, 0. Backward: bitwise repeatable, fp32 sums, one rounding.

    Raises:
        ValueError, TypeError: an argument breaks this contract; ids outside {-1} and [0, valid_vocab) where values
            are checked.
    """
    if empty_support not in EMPTY_SUPPORT:
        raise ValueError(f"empty_support: expected one of {', '.join(EMPTY_SUPPORT)}, got {empty_support!r}")
    _options.plain(ignore_index, valid_vocab, vocab_start, vocab_size, check, backend)
    workspace = _options.workspace(workspace_bytes)
    _checks.head(
        hidden, weight, {"support_ids": support_ids, "sampled_ids": sampled_ids},
        {"bias": bias, "active": active, "trajectory_ids": trajectory_ids},
    )  # fmt: skip
    temperature, row_temperature = _checks.temperature(temperature, hidden)
    per_row = {"sampled_ids": sampled_ids, "active": active, "temperature": row_temperature}
    _checks.rows(hidden, {**per_row, "trajectory_ids": trajectory_ids})
    _checks.id_lists("support_ids", support_ids, hidden, (torch.int32,))
    _checks.group(group, vocab_size)
    options = {
        "temperature": temperature,
        "softcap": None if softcap is None else _checks.number("softcap", softcap),
        "logit_scale": _checks.number("logit_scale", logit_scale),
        "ignore_index": ignore_index,
        "valid_vocab": valid_vocab,
        "vocab_start": vocab_start,
        "vocab_size": vocab_size,
    }
    logprob, entropy, _, valid = _forward(
        hidden, weight, bias, sampled_ids, support_ids, active, row_temperature, *options.values(),
        "grad" if entropy_requires_grad else "metric", _checks.autocast_dtype(hidden),
        workspace, check, backend, distributed.group_name(group),
    )  # fmt: skip
    if empty_support != "zero":
        empty = (support_ids < 0).all(-1) & (sampled_ids != ignore_index)
        if active is not None:
            empty &= active > 0
        if empty_support == "error" and bool(empty.any()):
            row = int(empty.reshape(-1).nonzero()[0])
            raise ValueError(f"support_ids: expected a candidate in every active row, got none in row {row}")
        if empty_support == "full":
            if trajectory_ids is not None:
                _second_in_trajectory(empty, trajectory_ids)
            from . import linear_logprobs

            whole = linear_logprobs(
                hidden, weight, sampled_ids, bias=bias, active=empty, group=group, check=check,
                workspace_bytes=workspace_bytes,
                **{**options, "temperature": options["temperature"] if row_temperature is None else row_temperature},
            )  # fmt: skip
            logprob = logprob + whole
    return (logprob, entropy, valid) if return_valid else (logprob, entropy)
