"""Full-vocabulary log-probabilities of K given ids a row, in the forward and backward of linear_logprobs.

    lmhead::selected_logprobs            forward: (logprob, entropy, lse, selected, logits)
    lmhead::selected_logprobs_backward   (hidden, weight, bias) gradients
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks, _core, _options, _reported, _tensors, distributed

# As torch_ops._OPTIONS: plain values in the order of the operator's schema.
_OPTIONS = (
    "temperature", "softcap", "logit_scale", "ignore_index", "valid_vocab", "vocab_start", "vocab_size",
    "entropy", "compute_dtype", "workspace_bytes", "check", "backend", "group",
)  # fmt: skip


def _with_targets(ids: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """[N, K + 1] int64: the ids, then the row's target (-1 where it is ignored)."""
    own = targets.reshape(-1, 1).long()
    own = torch.where(own == ignore_index, -1, own)
    return torch.cat([ids.reshape(own.shape[0], ids.shape[-1]).long(), own], dim=1)


def _call(hidden, weight, bias, targets, active, row_temperature, options) -> _tensors.Call:
    return _tensors.Call(hidden, weight, bias, targets, active, row_temperature, {**options, "out_of_vocab": "error"})


@torch.library.custom_op("lmhead::selected_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ids: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    with distributed.reporting(group, check, hidden.device):
        call = _call(hidden, weight, bias, targets, active, row_temperature, options)
        n, k = call.hidden.shape[0], ids.shape[-1]
        with call.guard():
            all_ids = _with_targets(ids, targets, ignore_index)
            logprob, entropies, lse = call.results(targets.shape, entropy != "off")
            logits, selected = (torch.empty((n, k + 1), dtype=call.result_dtype, device=call.device) for _ in range(2))
            outputs = _core.ForwardOutputs()
            outputs.logprob, outputs.lse = _tensors.output_vector(logprob.view(-1)), _tensors.output_vector(lse.view(-1))
            if entropy != "off":
                outputs.entropy = _tensors.output_vector(entropies.view(-1))
            rank, ranks = distributed.rank_and_size(group)
            call.reserve_workspace(_core.Operation.forward if group is None else _core.Operation.forward_partial)
            chosen = _core.SelectedProblem()
            chosen.head, chosen.ids = call.problem, _tensors.matrix("ids", all_ids)
            reader = _call(hidden, weight, bias, targets, active, row_temperature, {**options, "backend": "auto"})
            reader.set_workspace(_core.selected_workspace_size(chosen, reader.execution))
    with call.guard():
        if group is not None:
            if distributed.is_checked(check, call.device):
                distributed.settle(call, "selected_logprobs", group, extra=k)
                call.execution.set_check(False)
            states = torch.empty((ranks * n, _tensors.STATE_WIDTH), dtype=call.result_dtype, device=call.device)
            state = states[rank * n : (rank + 1) * n]
            _core.forward_partial(call.problem, _tensors.output_matrix(state), call.execution)
            distributed.gather_rows("state", state, group, states)
            _core.combine(call.problem, _tensors.matrix("states", states), outputs, call.execution)
        else:
            _core.forward(call.problem, outputs, call.execution)
        _core.selected_logits(chosen, _tensors.output_matrix(logits), reader.execution)
        everyone = logits if group is None else distributed.gather_rows("selected", logits, group)
        _core.selected_combine(
            chosen, _tensors.matrix("logits", everyone), _tensors.vector("lse", lse.view(-1)),
            _tensors.vector("logprob", logprob.view(-1)), _tensors.output_matrix(selected), reader.execution,
        )  # fmt: skip
    return logprob, entropies, lse, selected[:, :k].reshape(*targets.shape, k).clone(), logits


@_forward.register_fake
def _(hidden, weight, bias, targets, ids, active, row_temperature, *options):
    entropy, result = options[_OPTIONS.index("entropy")], _tensors.result_dtype(hidden)
    logprob, lse = (hidden.new_empty(targets.shape, dtype=result) for _ in range(2))
    entropies = hidden.new_empty((0,) if entropy == "off" else targets.shape, dtype=result)
    selected = hidden.new_empty((*targets.shape, ids.shape[-1]), dtype=result)
    return logprob, entropies, lse, selected, hidden.new_empty((targets.numel(), ids.shape[-1] + 1), dtype=result)


@torch.library.custom_op("lmhead::selected_logprobs_backward", mutates_args=())
def _backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    dselected: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ids: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor | None,
    logits: Tensor,
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
    call = _call(hidden, weight, bias, targets, active, row_temperature, options)
    with call.guard():
        dx = _tensors.gradient_like(hidden, need_hidden, hidden)
        dw = _tensors.gradient_like(weight, need_weight, hidden)
        db = _tensors.gradient_like(bias, need_bias, hidden)
        all_ids = _with_targets(ids, targets, ignore_index)
        n, width = all_ids.shape
        upstream = torch.zeros((n, width), dtype=call.result_dtype, device=call.device)
        if dselected is not None:
            upstream[:, :-1] = dselected.reshape(n, width - 1)
        if dlogprob is not None:
            upstream[:, -1] = dlogprob.reshape(n)
        upstream.masked_fill_(all_ids == -1, 0.0)
        total = upstream.sum(1)
        held = {  # alive until the call is queued
            "lse": lse.reshape(-1),
            "entropy": None if dentropy is None else entropies.reshape(-1),
            "dlogprob": total,
            "dentropy": _tensors.upstream(dentropy, call),
        }
        inputs = _core.BackwardInputs()
        for name, vector in held.items():
            if vector is not None:
                setattr(inputs, name, _tensors.vector(name, vector))
        selected = {"ids": all_ids, "logits": logits, "upstream": upstream}
        inputs.set_selected(*(_tensors.matrix(name, matrix) for name, matrix in selected.items()))
        outputs = _core.BackwardOutputs()
        if need_hidden:
            outputs.hidden = _tensors.output_matrix(dx.view(-1, hidden.shape[-1]) if dx.numel() else _tensors.rows(dx))
        if need_weight:
            outputs.weight = _tensors.output_matrix(dw)
        if need_bias:
            outputs.bias = _tensors.output_vector(db)
        call.reserve_workspace(_core.Operation.backward, outputs)
        _core.backward(call.problem, inputs, outputs, call.execution)
    return dx, dw, db


@_backward.register_fake
def _(dlogprob, dentropy, dselected, hidden, weight, bias, *rest):
    need_hidden, need_weight, need_bias = rest[7:10]
    return (
        _tensors.gradient_like(hidden, need_hidden, hidden),
        _tensors.gradient_like(weight, need_weight, hidden),
        _tensors.gradient_like(bias, need_bias, hidden),
    )


def _setup_context(ctx, inputs, output):
    hidden, weight, bias, targets, ids, active, row_temperature, *options = inputs
    _, entropies, lse, _, logits = output
    ctx.options = tuple(options)
    ctx.differentiable_entropy = options[_OPTIONS.index("entropy")] == "grad"
    ctx.mark_non_differentiable(*((lse, logits) if ctx.differentiable_entropy else (entropies, lse, logits)))
    ctx.set_materialize_grads(False)
    saved_entropy = entropies if ctx.differentiable_entropy else None
    ctx.save_for_backward(
        hidden, weight, bias, targets, ids, active, row_temperature, lse, saved_entropy, logits
    )


def _autograd_backward(ctx, dlogprob, dentropy, dlse, dselected, dlogits):
    if not ctx.differentiable_entropy:
        dentropy = None
    gradients = [None] * len(ctx.needs_input_grad)
    if dlogprob is None and dentropy is None and dselected is None:
        return tuple(gradients)
    needs = ctx.needs_input_grad[:3]
    results = _backward(dlogprob, dentropy, dselected, *ctx.saved_tensors, *needs, *ctx.options)
    gradients[:3] = [g if needed else None for g, needed in zip(results, needs)]
    return tuple(gradients)


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward.register_autograd(_tensors.no_double_backward, setup_context=lambda ctx, inputs, output: None)


@_reported
def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    return_entropy: bool = False,
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
    workspace_bytes: int | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target and of K more ids a row, from one projection: distillation from a top-k teacher.

        logp = log_softmax(logits as in linear_logprobs, dim=-1)
        logprob, selected = logp.gather(-1, targets[..., None])[..., 0], logp.gather(-1, ids)

    Both, and the entropy, are differentiated in one backward; the gradients at the ids join the dense ones before
    their rounding. All options are those of linear_logprobs (out_of_vocab is "error").

    Args:
        targets: [...] int32 or int64, or ignore_index (an inactive row: everything 0).
        ids: [..., K] int32 or int64 global ids, in any order, repeats allowed; -1 is padding (0, no gradient).

    Returns:
        (logprob [...], selected [..., K]), with return_entropy also entropy [...]; fp32 in nats.

    Raises:
        ValueError, TypeError: an argument breaks this contract; ids outside {-1} and [0, valid_vocab) where values
            are checked (elsewhere they become NaN).
    """
    entropy = _options.entropy_mode(return_entropy, entropy_requires_grad, False)
    _options.plain(ignore_index, valid_vocab, vocab_start, vocab_size, check, backend)
    workspace_bytes = _options.workspace(workspace_bytes)
    _checks.head(hidden, weight, {"targets": targets, "ids": ids}, {"bias": bias, "active": active})
    temperature, row_temperature = _checks.temperature(temperature, hidden)
    _checks.rows(hidden, {"targets": targets, "active": active, "temperature": row_temperature})
    _checks.id_lists("ids", ids, hidden, (torch.int32, torch.int64))
    _checks.group(group, vocab_size)
    logprob, entropies, _, selected, _ = _forward(
        hidden, weight, bias, targets, ids, active, row_temperature, temperature,
        None if softcap is None else _checks.number("softcap", softcap), _checks.number("logit_scale", logit_scale),
        ignore_index, valid_vocab, vocab_start, vocab_size, entropy, _checks.autocast_dtype(hidden), workspace_bytes,
        check, backend, distributed.group_name(group),
    )  # fmt: skip
    return (logprob, selected) if entropy == "off" else (logprob, selected, entropies)
