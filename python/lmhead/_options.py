"""Options of a scoring call, checked once and turned into the extension's types.

What needs no tensor type is here, so that NumPy arrays and PyTorch tensors share it. Shapes, dtypes and
values are checked by the C++ library itself; its messages name the argument.
"""

from __future__ import annotations

import operator
from typing import Any

from . import _core

ENTROPY_MODES = {mode: getattr(_core.EntropyMode, mode) for mode in ("off", "metric", "grad")}
OUT_OF_VOCAB = {rule: getattr(_core.OutOfVocab, rule) for rule in ("error", "zero")}
DTYPES = {
    name: getattr(_core.DType, name)
    for name in (
        "float32", "bfloat16", "float16", "float64", "int32", "int64", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip


def entropy_mode(return_entropy: bool, entropy_requires_grad: bool, inference_only: bool) -> str:
    """ "off", "metric" or "grad"; ValueError for combinations that contradict themselves."""
    if entropy_requires_grad and not return_entropy:
        raise ValueError("entropy_requires_grad: expected return_entropy=True with it, got return_entropy=False")
    if entropy_requires_grad and inference_only:
        raise ValueError("entropy_requires_grad: expected inference_only=False with it, got inference_only=True")
    return "grad" if entropy_requires_grad else "metric" if return_entropy else "off"


def out_of_vocab_rule(rule: str) -> str:
    if not isinstance(rule, str) or rule not in OUT_OF_VOCAB:
        raise ValueError(f'out_of_vocab: expected "error" or "zero", got {rule!r}')
    return rule


def number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        if not isinstance(value, bool) and hasattr(value, "__float__"):  # a number of NumPy
            return float(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer within 64 bits, got {number}")
    return number


def plain(
    ignore_index: Any, valid_vocab: Any, vocab_start: Any, vocab_size: Any, check: Any, backend: Any
) -> None:
    """Types of the options that are no tensors; what passes them on would not name the argument."""
    integer("ignore_index", ignore_index)
    integer("vocab_start", vocab_start)
    for name, value in (("valid_vocab", valid_vocab), ("vocab_size", vocab_size)):
        if value is not None:
            integer(name, value)
    if check is not None and not isinstance(check, (bool, int)):
        raise TypeError(f"check: expected a bool or None, got {type(check).__name__}")
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {type(backend).__name__}")


def workspace(workspace_bytes: Any) -> int:
    """The budget, or 0 for the backend's default."""
    return 0 if workspace_bytes is None else byte_count("workspace_bytes", workspace_bytes, 1)


def byte_count(name: str, value: Any, at_least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a number of bytes, got {type(value).__name__}")
    count = integer(name, value)
    if count < at_least:
        raise ValueError(f"{name}: expected >= {at_least} bytes, got {count}")
    return count


# What dtypes that the library does not know could have been meant as; it checks those that it knows.
_IDS, _FLAGS = "int32 or int64", "bool, int8, int16, int32, int64 or uint8"
_EXPECTED = {
    "targets": _IDS, "ids": _IDS, "input_ids": _IDS, "sampled_ids": _IDS, "support_ids": "int32",
    "active": _FLAGS, "loss_mask": _FLAGS,
}  # fmt: skip


def dtype_of(name: str, dtype: str) -> _core.DType:
    """The extension's dtype for NumPy's or PyTorch's name of it, such as "bfloat16"."""
    try:
        return DTYPES[dtype]
    except KeyError:
        expected = _EXPECTED.get(name, "float32, bfloat16, float16 or float64")
        raise TypeError(f"{name}: expected {expected}, got {dtype}") from None


def problem(
    *,
    hidden: _core.ConstMatrix,
    weight: _core.ConstMatrix,
    targets: _core.ConstVector,
    bias: _core.ConstVector | None,
    active: _core.ConstVector | None,
    row_temperature: _core.ConstVector | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    out_of_vocab: str,
    valid_vocab: int | None,
    vocab_start: int,
    vocab_size: int | None,
    entropy: str,
    inference_only: bool,
    compute_dtype: _core.DType | None = None,
) -> _core.Problem:
    """Problem of include/lmhead/types.h. It borrows the memory behind the views."""
    p = _core.Problem()
    p.hidden = hidden
    p.weight = weight
    p.targets = targets
    if bias is not None:
        p.bias = bias
    if active is not None:
        p.active = active
    if row_temperature is not None:
        p.row_temperature = row_temperature
    p.temperature = temperature
    p.softcap = softcap
    p.logit_scale = logit_scale
    p.ignore_index = ignore_index
    p.out_of_vocab = OUT_OF_VOCAB[out_of_vocab]
    p.valid_vocab = valid_vocab
    p.vocab_start = vocab_start
    p.vocab_size = vocab_size
    p.entropy = ENTROPY_MODES[entropy]
    p.inference_only = bool(inference_only)
    p.compute_dtype = compute_dtype
    return p
