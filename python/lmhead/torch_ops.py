"""`torch.library` operators under `lmhead::`, and the function form on top of them.

    lmhead::linear_logprobs            forward: (logprob, entropy, lse, cache)
    lmhead::linear_logprobs_backward   (hidden, weight, bias) gradients
    lmhead::linear_logprobs_backward_  the same, and adds the weight's gradient to weight_main_grad
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks, _core, _tensors, distributed

# Everything that shapes a call beside its tensors. Flat and plain, since operator schemas hold nothing else.
_OPTIONS = (
    "temperature", "softcap", "logit_scale", "ignore_index", "out_of_vocab", "valid_vocab", "vocab_start",
    "vocab_size", "entropy", "compute_dtype", "workspace_bytes", "check", "backend", "group",
)  # fmt: skip


def _empty_gathered(hidden: Tensor, group: str) -> Tensor:
    """Room for the rows of all ranks under sequence parallelism."""
    return hidden.new_empty((distributed.rank_and_size(group)[1] * hidden.shape[0], *hidden.shape[1:]))


def cache_room(cache_bytes: int, n: int, v: int) -> int:
    """Bytes to allocate for what the forward keeps of n rows over v columns: no more than it can use. In plain
    arithmetic, since sizes may be symbols here."""
    if not cache_bytes:
        return 0
    # lmhead::cache_size asks for 544 bytes a row and tile of 256 columns; octants and a shard's ends round up.
    return torch.sym_min(cache_bytes, (n + 15) * ((v // 256 + 12) * 544 + 8) + 1024)


@torch.library.custom_op("lmhead::linear_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    weight_main_grad: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    out_of_vocab: str,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int,
    check: bool | None,
    backend: str,
    group: str | None,
    reduce_hidden_grad: str | None,
    cache_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = {name: value for name, value in locals().items() if name in _OPTIONS}
    with distributed.reporting(group, check, hidden.device):
        rows = hidden if reduce_hidden_grad != "reduce_scatter" else _empty_gathered(hidden, group)
        call = _tensors.Call(rows, weight, bias, targets, active, row_temperature, options)
        n = call.hidden.shape[0]
        with call.guard():
            logprob, entropies, lse = call.results(targets.shape, entropy != "off")
            outputs = _core.ForwardOutputs()
            outputs.logprob, outputs.lse = _tensors.output_vector(logprob.view(-1)), _tensors.output_vector(lse.view(-1))
            if entropy != "off":
                outputs.entropy = _tensors.output_vector(entropies.view(-1))
            rank, ranks = distributed.rank_and_size(group)
            if group is not None:
                states = torch.empty((ranks * n, _tensors.STATE_WIDTH), dtype=call.result_dtype, device=call.device)
            call.reserve_workspace(_core.Operation.forward if group is None else _core.Operation.forward_partial)
            cache = hidden.new_empty(cache_room(cache_bytes, n, weight.shape[0]), dtype=torch.uint8)
            if cache_bytes:
                _core.cache_size(call.problem, cache_bytes, call.execution)  # raises where none can be kept
            call.set_cache(cache)
    with call.guard():
        if distributed.is_checked(check, call.device):
            distributed.settle(call, "linear_logprobs", group, extra=distributed.REDUCTIONS.index(reduce_hidden_grad))
        if group is None:
            _core.forward(call.problem, outputs, call.execution)
        else:
            if rows is not hidden:
                distributed.gather_rows("hidden", hidden, group, rows)
            state = states[rank * n : (rank + 1) * n]  # this rank's part of the message, in place
            _core.forward_partial(call.problem, _tensors.output_matrix(state), call.execution)
            distributed.gather_rows("state", state, group, states)
            _core.combine(call.problem, _tensors.matrix("states", states), outputs, call.execution)
    return logprob, entropies, lse, cache


@_forward.register_fake
def _(hidden, weight, bias, targets, active, row_temperature, weight_main_grad, *options):
    cache_bytes = options[-1]
    entropy = options[_OPTIONS.index("entropy")]
    logprob, lse = (hidden.new_empty(targets.shape, dtype=_tensors.result_dtype(hidden)) for _ in range(2))
    entropies = hidden.new_empty((0,) if entropy == "off" else targets.shape, dtype=_tensors.result_dtype(hidden))
    cache = hidden.new_empty(cache_room(cache_bytes, targets.numel(), weight.shape[0]), dtype=torch.uint8)
    return logprob, entropies, lse, cache


def _run_backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor | None,
    cache: Tensor | None,
    weight_main_grad: Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    reduce_hidden_grad: str | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    group = options["group"]
    if reduce_hidden_grad == "reduce_scatter":  # only this rank's rows were saved
        shard, hidden = hidden, _empty_gathered(hidden, group)
        distributed.gather_rows("hidden", shard, group, hidden)
    call = _tensors.Call(hidden, weight, bias, targets, active, row_temperature, options)
    with call.guard():
        dx = _tensors.gradient_like(hidden, need_hidden, hidden)
        dw = _tensors.gradient_like(weight, need_weight, hidden)
        db = _tensors.gradient_like(bias, need_bias, hidden)
        if need_hidden and reduce_hidden_grad is not None:
            dx = hidden.new_empty(hidden.shape, dtype=call.result_dtype)  # rounded once, after the sum
        flat = {
            "lse": _tensors.flat(lse),
            "entropy": None if dentropy is None else _tensors.flat(entropies),
            "dlogprob": _tensors.upstream(dlogprob, call),
            "dentropy": _tensors.upstream(dentropy, call),
        }
        inputs = _core.BackwardInputs()
        for name, vector in flat.items():
            if vector is not None:
                setattr(inputs, name, _tensors.vector(name, vector))
        outputs = _core.BackwardOutputs()
        if need_hidden:
            outputs.hidden = _tensors.output_matrix(dx.view(-1, hidden.shape[-1]) if dx.numel() else _tensors.rows(dx))
        if weight_main_grad is not None and weight.numel():
            outputs.weight, outputs.accumulate_weight = _tensors.output_matrix(weight_main_grad), True
        elif need_weight:
            outputs.weight = _tensors.output_matrix(dw)
        if need_bias:
            outputs.bias = _tensors.output_vector(db)
        call.reserve_workspace(_core.Operation.backward, outputs)
        call.set_cache(cache)
        _core.backward(call.problem, inputs, outputs, call.execution)
        if need_hidden and reduce_hidden_grad is not None:
            dx = distributed.reduce_hidden_grad(dx, reduce_hidden_grad, group).to(hidden.dtype)
    return dx, dw, db


@torch.library.custom_op("lmhead::linear_logprobs_backward", mutates_args=())
def _backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor | None,
    cache: Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    reduce_hidden_grad: str | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    out_of_vocab: str,
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
    scope = locals()
    return _run_backward(
        dlogprob, dentropy, hidden, weight, bias, targets, active, row_temperature, lse, entropies, cache, None,
        need_hidden, need_weight, need_bias, reduce_hidden_grad, {name: scope[name] for name in _OPTIONS},
    )  # fmt: skip


@torch.library.custom_op("lmhead::linear_logprobs_backward_", mutates_args=("weight_main_grad",))
def _backward_main_grad(
    weight_main_grad: Tensor,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    lse: Tensor,
    entropies: Tensor | None,
    cache: Tensor | None,
    need_hidden: bool,
    need_bias: bool,
    reduce_hidden_grad: str | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    out_of_vocab: str,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int,
    check: bool | None,
    backend: str,
    group: str | None,
) -> tuple[Tensor, Tensor]:
    scope = locals()
    dx, _, db = _run_backward(
        dlogprob, dentropy, hidden, weight, bias, targets, active, row_temperature, lse, entropies, cache,
        weight_main_grad, need_hidden, False, need_bias, reduce_hidden_grad, {name: scope[name] for name in _OPTIONS},
    )  # fmt: skip
    return dx, db


@_backward.register_fake
def _(dlogprob, dentropy, hidden, weight, bias, *rest):
    need_hidden, need_weight, need_bias = rest[6:9]
    return (
        _tensors.gradient_like(hidden, need_hidden, hidden),
        _tensors.gradient_like(weight, need_weight, hidden),
        _tensors.gradient_like(bias, need_bias, hidden),
    )


@_backward_main_grad.register_fake
def _(weight_main_grad, dlogprob, dentropy, hidden, weight, bias, *rest):
    need_hidden, need_bias = rest[6:8]
    return _tensors.gradient_like(hidden, need_hidden, hidden), _tensors.gradient_like(bias, need_bias, hidden)


def _setup_context(ctx, inputs, output):
    hidden, weight, bias, targets, active, row_temperature, weight_main_grad, *options = inputs
    *options, reduce_hidden_grad, cache_bytes = options
    logprob, entropies, lse, cache = output
    ctx.options, ctx.reduce_hidden_grad = tuple(options), reduce_hidden_grad
    ctx.differentiable_entropy = options[_OPTIONS.index("entropy")] == "grad"
    ctx.mark_non_differentiable(*((lse, cache) if ctx.differentiable_entropy else (lse, cache, entropies)))
    ctx.set_materialize_grads(False)
    # Not a saved tensor: every backward changes it in place.
    ctx.weight_main_grad = weight_main_grad
    saved_entropy = entropies if ctx.differentiable_entropy else None
    saved_cache = cache if cache_bytes else None
    ctx.save_for_backward(hidden, weight, bias, targets, active, row_temperature, lse, saved_entropy, saved_cache)


def _autograd_backward(ctx, dlogprob, dentropy, dlse, dcache):
    if not ctx.differentiable_entropy:
        dentropy = None
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    gradients = [None] * len(ctx.needs_input_grad)
    if dlogprob is None and dentropy is None:
        return tuple(gradients)
    arguments = (dlogprob, dentropy, *ctx.saved_tensors)
    if need_weight and ctx.weight_main_grad is not None:
        with torch.no_grad():
            dx, db = _backward_main_grad(
                ctx.weight_main_grad, *arguments, need_hidden, need_bias, ctx.reduce_hidden_grad, *ctx.options
            )
        if torch.is_grad_enabled():  # create_graph=True
            dx, db = _FirstDerivative.apply(dx, db, dlogprob, dentropy, *ctx.saved_tensors[:3])
        dw = None
    else:
        dx, dw, db = _backward(
            *arguments, need_hidden, need_weight, need_bias, ctx.reduce_hidden_grad, *ctx.options
        )
    gradients[:3] = dx if need_hidden else None, dw if need_weight else None, db if need_bias else None
    return tuple(gradients)


class _FirstDerivative(torch.autograd.Function):
    """Passes gradients on, and refuses theirs: an operator that changes an argument cannot have a formula of its own."""

    @staticmethod
    def forward(ctx, dx, db, *inputs):
        return dx.view_as(dx), db.view_as(db)

    backward = staticmethod(_tensors.no_double_backward)


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward.register_autograd(_tensors.no_double_backward, setup_context=lambda ctx, inputs, output: None)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    active: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    out_of_vocab: str,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    inference_only: bool,
    group: Any,
    reduce_hidden_grad: str | None,
    weight_main_grad: Tensor | None,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int,
    cache_bytes: int,
    check: bool | None,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """See lmhead.linear_logprobs, whose options these are."""
    _checks.head(
        hidden, weight, {"targets": targets}, {"bias": bias, "active": active, "weight_main_grad": weight_main_grad}
    )
    temperature, row_temperature = _checks.temperature(temperature, hidden)
    if reduce_hidden_grad not in distributed.REDUCTIONS:
        raise ValueError(f"reduce_hidden_grad: expected None, 'sum' or 'reduce_scatter', got {reduce_hidden_grad!r}")
    if reduce_hidden_grad is not None and group is None:
        raise ValueError(f"reduce_hidden_grad: expected a group with it, got {reduce_hidden_grad!r} and group=None")
    per_row = {"targets": targets, "active": active, "temperature": row_temperature}
    if reduce_hidden_grad == "reduce_scatter":
        if hidden.dim() == 1:
            raise ValueError("hidden: expected [N, H] or more for reduce_scatter, got one row [H]")
        ranks = distributed.rank_and_size(group)[1]
        shape = torch.Size((ranks * hidden.shape[0], *hidden.shape[1:-1]))
        _checks.rows(hidden, per_row, shape, f"for {ranks} ranks with")
    else:
        _checks.rows(hidden, per_row)
    if weight_main_grad is not None:
        if weight_main_grad.shape != weight.shape:
            raise ValueError(
                f"weight_main_grad: expected {list(weight.shape)} like weight, got {list(weight_main_grad.shape)}"
            )
        if weight_main_grad.dtype != _tensors.result_dtype(hidden):
            expected, got = map(_tensors.dtype_name, (_tensors.result_dtype(hidden), weight_main_grad.dtype))
            raise TypeError(f"weight_main_grad: expected {expected}, got {got}")
        if weight.shape[1] > 1 and weight_main_grad.stride(1) != 1:
            raise ValueError(
                "weight_main_grad: expected contiguous columns (stride 1 along H), got strides "
                f"{tuple(weight_main_grad.stride())}"
            )
    _checks.group(group, vocab_size)
    if inference_only or not torch.is_grad_enabled() or not any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    ):
        cache_bytes = 0  # no backward will come
    if compute_dtype is None:
        compute_dtype = _checks.autocast_dtype(hidden)
    elif not isinstance(compute_dtype, torch.dtype):
        raise TypeError(f"compute_dtype: expected a torch.dtype, got {compute_dtype!r}")
    arguments = (
        hidden, weight, bias, targets, active, row_temperature, weight_main_grad, temperature,
        None if softcap is None else _checks.number("softcap", softcap), _checks.number("logit_scale", logit_scale),
        ignore_index, out_of_vocab, valid_vocab, vocab_start, vocab_size, entropy, compute_dtype, workspace_bytes, check,
        backend, distributed.group_name(group), reduce_hidden_grad, cache_bytes,
    )  # fmt: skip
    if inference_only:
        with torch.no_grad():
            logprob, entropies, *_ = _forward(*arguments)
    else:
        logprob, entropies, *_ = _forward(*arguments)
    return logprob if entropy == "off" else (logprob, entropies)
