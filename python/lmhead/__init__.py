"""lmhead: per-token log-probabilities and policy entropy of a language-model head.

`linear_logprobs` takes hidden states and the LM-head weight and never holds the [tokens, vocabulary] logits.
PyTorch is optional: without it NumPy arrays can be scored (forward only).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import _core, _options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .module import LinearLogprobs
    from .selected import selected_logprobs
    from .support import support_logprobs

    Array = Any  # torch.Tensor or numpy.ndarray, one kind a call

_P, _R = ParamSpec("_P"), TypeVar("_R")

__all__ = [
    "Batch",
    "BatchReport",
    "DpAlignedBatchSampler",
    "LinearLogprobs",
    "PackedCollator",
    "PackedLayout",
    "PackingMetrics",
    "active_spans",
    "check_active_spans",
    "info",
    "last_backend",
    "linear_logprobs",
    "pack",
    "packed_logprobs",
    "packed_support_logprobs",
    "packing_lower_bound",
    "packing_metrics",
    "sequence_alignment",
    "selected_logprobs",
    "support_logprobs",
    "total_alignment",
    "tune",
    "unpacked_alignment",
]
__version__: str = _core.version()

# Names imported at first use, and the module that holds each; some need NumPy or PyTorch.
_LAZY = {
    "LinearLogprobs": "module",
    **dict.fromkeys(("Batch", "BatchReport", "DpAlignedBatchSampler"), "batching"),
    "PackedCollator": "collate",
    **dict.fromkeys(("PackedLayout", "active_spans", "check_active_spans"), "layout"),
    **dict.fromkeys(("sequence_alignment", "total_alignment", "unpacked_alignment"), "layout"),
    **dict.fromkeys(("PackingMetrics", "pack", "packing_lower_bound", "packing_metrics"), "packing"),
    "packed_logprobs": "packed",
    "packed_support_logprobs": "packed_support",
    "selected_logprobs": "selected",
    "support_logprobs": "support",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _reported(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """With a group, whatever a call raises reaches the other ranks, which would wait for it otherwise."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if options.get("group") is None:
            return function(*args, **options)
        import torch

        if torch.compiler.is_compiling():  # the operator itself reports
            return function(*args, **options)
        from . import distributed

        device = distributed.device_of(*args, *options.values())
        with distributed.reporting(options["group"], options.get("check"), device):
            return function(*args, **options)

    return call


@_reported
def linear_logprobs(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    return_entropy: bool = False,
    entropy_requires_grad: bool = False,
    inference_only: bool = False,
    temperature: float | Array = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    out_of_vocab: str = "error",
    valid_vocab: int | None = None,
    active: Array | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    reduce_hidden_grad: str | None = None,
    weight_main_grad: Array | None = None,
    compute_dtype: Any = None,
    workspace_bytes: int | None = None,
    cache_bytes: int = 0,
    check: bool | None = None,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:
    """Log-probability of each target, and optionally the entropy, under `softmax(hidden @ weight.T)`.

    The same numbers as

        logits = logit_scale * (hidden.float() @ weight.float().T + bias)
        logits = softcap * tanh(logits / softcap)                       # with a softcap
        logp = log_softmax(logits / temperature[..., None], dim=-1)
        logprob, entropy = logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)

    in fp32 from the accumulator on, without the logits in memory. Differentiable in hidden, weight and bias;
    forward only for NumPy arrays.

    Args:
        hidden: [..., H] bf16, fp16, fp32 (fp64: reference backend). Read in place when its rows are evenly
            spaced; anything else is copied for the duration of the call.
        weight: [V, H], any of these types; columns contiguous, rows at any stride. This rank's rows with `group`.
        targets: [...] int32 or int64, global ids. `ignore_index` makes a row inactive.
        bias: [V], optional.
        return_entropy: also return the entropy. Alone, it is a metric: no gradient, and log-prob and every
            gradient have the bits of a call without it.
        entropy_requires_grad: make it differentiable, in the same backward.
        inference_only: no backward will come: nothing is saved, and the results need no gradient.
        temperature: a number > 0, or one per row: a tensor [...] or with one element. No gradient.
        softcap: > 0, or None for none.
        logit_scale: multiplies the logits, bias included.
        ignore_index: target id that makes a row inactive: logprob, entropy and its gradients are 0.
        out_of_vocab: what any other id outside [0, valid_vocab) is: "error", or "zero": logprob 0, entropy still
            true, and the softmax part of the gradient stays.
        valid_vocab: global columns from here on are padding and take no part. Default: vocab_size.
        active: [...] bool or integer: rows with active > 0 are computed, all others are 0 and cost nothing.
        vocab_start, vocab_size: this rank holds ids [vocab_start, vocab_start + V) of vocab_size.
        group: torch.distributed group of the vocabulary shards, in vocabulary order. Every rank gets the same
            results from one all-gather of 16 bytes a token; the backward has none unless reduce_hidden_grad.
            With `check` (the CPU's default) a rank that raises, or calls with other sizes or options, raises
            on every rank; see docs/parallelism.md.
        reduce_hidden_grad: None: the gradient of hidden is the part of this rank's columns, and the caller sums it
            over `group`. "sum": the sum of all parts, added in fp32 and rounded once. "reduce_scatter" (sequence
            parallelism): hidden is this rank's share [N / size, ..., H] of the rows, in rank order, is gathered
            for the call, and gets its own rows' gradient; targets and the other row data are whole.
        weight_main_grad: [V, H] fp32: the weight's gradient is added to it, and the weight gets none.
        compute_dtype: torch dtype in which hidden and weight are multiplied (accumulation stays fp32); the weight is
            rounded tile by tile. Default: autocast's, else the weight's.
        workspace_bytes: budget for scratch memory. Default: 64 MiB on the CPU, 512 MiB on a GPU.
        cache_bytes: at most this much GPU memory holds exponentials of the forward (2 bytes a logit) until the
            backward, which then does not repeat the projection of the first active rows that fit: a quarter of forward
            and backward less when all fit. Changes no bit of the results, and gradients by less than a tenth of their
            error. Backend "sm90" only; otherwise a NotImplementedError, unless no backward can come.
        check: read and check ids and temperatures. Default: on the CPU only, since a GPU would have to wait;
            unchecked, a bad one makes its own row NaN.
        backend: "auto", or one of `info()`; a backend that cannot run the call is an error.

    Returns:
        logprob [...] fp32 in nats (fp64 for fp64 inputs); with return_entropy the pair (logprob, entropy).

    Raises:
        ValueError, TypeError: an argument breaks this contract; the message names it.
        NotImplementedError: `backend` cannot run it.
        MemoryError, torch.OutOfMemoryError: there is no room for results or workspace.
        RuntimeError: another rank of `group` failed, called with other sizes or options, or is gone.
    """
    entropy = _options.entropy_mode(return_entropy, entropy_requires_grad, inference_only)
    _options.plain(ignore_index, valid_vocab, vocab_start, vocab_size, check, backend)
    options = {
        "bias": bias,
        "active": active,
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "ignore_index": ignore_index,
        "out_of_vocab": _options.out_of_vocab_rule(out_of_vocab),
        "valid_vocab": valid_vocab,
        "vocab_start": vocab_start,
        "vocab_size": vocab_size,
        "entropy": entropy,
        "inference_only": inference_only,
        "cache_bytes": _options.byte_count("cache_bytes", cache_bytes, 0),
        "workspace_bytes": _options.workspace(workspace_bytes),
        "check": check,
        "backend": backend,
    }
    if not hasattr(hidden, "data_ptr"):  # not a torch.Tensor; torch is not imported to find out
        if type(hidden).__module__ != "numpy":
            raise TypeError(f"hidden: expected torch.Tensor or numpy.ndarray, got {type(hidden).__name__}")
        for name, value in (
            ("group", group),
            ("reduce_hidden_grad", reduce_hidden_grad),
            ("weight_main_grad", weight_main_grad),
            ("compute_dtype", compute_dtype),
        ):
            if value is not None:
                raise TypeError(f"hidden: expected torch.Tensor with {name}, got numpy.ndarray")
        from . import _numpy

        return _numpy.linear_logprobs(hidden, weight, targets, **options)
    from . import torch_ops

    return torch_ops.linear_logprobs(
        hidden,
        weight,
        targets,
        group=group,
        reduce_hidden_grad=reduce_hidden_grad,
        weight_main_grad=weight_main_grad,
        compute_dtype=compute_dtype,
        **options,
    )


def last_backend() -> str:
    """Name of the backend that ran the last projection on this thread (not the candidate sets of `support_logprobs`);
    "" before the first."""
    return _core.last_backend()


def info() -> dict[str, Any]:
    """Version and backends of this build, in the order in which "auto" tries them.

    Returns {"version", "cpu_count", "backends": [{"name", "device", "available", "description"}, ...]}; the
    description of an unavailable backend is the reason.
    """
    return {"version": __version__, "cpu_count": os.cpu_count(), "backends": _core.backends()}
