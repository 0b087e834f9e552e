"""Forward scoring of NumPy arrays, for programs that have no PyTorch."""

from __future__ import annotations

import numpy as np

from . import _core, _options


def _matrix(name: str, array: np.ndarray) -> _core.ConstMatrix:
    rows, cols = array.shape
    if any(step % array.itemsize for step in array.strides):
        raise ValueError(f"{name}: expected steps of whole elements ({array.itemsize} bytes), got {array.strides} bytes")
    row_stride, col_stride = (step // array.itemsize for step in array.strides)
    if cols > 1 and col_stride != 1:
        raise ValueError(f"{name}: expected contiguous columns (stride 1), got stride {col_stride}")
    dtype = _options.dtype_of(name, array.dtype.name)
    return _core.ConstMatrix(array.ctypes.data, rows, cols, row_stride, dtype)


def _vector(name: str, flat: np.ndarray | None) -> _core.ConstVector | None:
    if flat is None:
        return None
    stride = flat.strides[0] // flat.itemsize
    return _core.ConstVector(flat.ctypes.data, flat.size, stride, _options.dtype_of(name, flat.dtype.name))


def _output(array: np.ndarray) -> _core.Vector:
    return _core.Vector(array.ctypes.data, array.size, 1, _options.DTYPES[array.dtype.name])


def _array(name: str, value: object) -> np.ndarray | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        if not value.dtype.isnative:
            raise TypeError(f"{name}: expected this machine's byte order, got {value.dtype.str}")
        return value
    if isinstance(value, np.generic):  # one element of an array
        return np.asarray(value)
    raise TypeError(f"{name}: expected numpy.ndarray like hidden, got {type(value).__name__}")


def _whole(array: np.ndarray) -> np.ndarray:
    """Steps of whole elements, which the library counts in; a field of a structured array has others and is copied."""
    return np.ascontiguousarray(array) if any(step % array.itemsize for step in array.strides) else array


def _temperature(value, shape, dtype) -> tuple[float, np.ndarray | None]:
    """(number, None), or (1.0, one per row)."""
    if not isinstance(value, np.ndarray):
        return _options.number("temperature", value), None
    if value.dtype.kind not in "fiu":
        raise TypeError(f"temperature: expected real numbers, got {value.dtype.name}")
    if value.size == 1 and value.shape != shape:
        return float(value.reshape(())), None
    return 1.0, value.astype(dtype)


def linear_logprobs(
    hidden, weight, targets, *, bias, active, temperature, softcap, logit_scale, entropy, workspace_bytes, cache_bytes,
    check, backend, **options,
):  # fmt: skip
    """See lmhead.linear_logprobs, whose options these are; without a backward cache_bytes has no use."""
    if entropy == "grad":
        raise NotImplementedError("entropy_requires_grad: expected torch tensors, got numpy.ndarray (forward only)")
    hidden, weight, targets = _array("hidden", hidden), _array("weight", weight), _array("targets", targets)
    bias, active = _array("bias", bias), _array("active", active)
    if hidden.ndim < 1 or weight.ndim != 2:
        raise ValueError(
            f"weight: expected [V, H] for hidden [..., H], got {list(weight.shape)} and hidden {list(hidden.shape)}"
        )
    if bias is not None and bias.ndim != 1:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    rows = _whole(hidden.reshape(-1, hidden.shape[-1]) if hidden.size else hidden.reshape(0, hidden.shape[-1]))
    n, h = rows.shape
    if h > 1 and rows.strides[1] != rows.itemsize or n > 1 and rows.strides[0] < h * rows.itemsize:
        rows = np.ascontiguousarray(rows)
    shape = hidden.shape[:-1]
    dtype = np.float64 if hidden.dtype == np.float64 else np.float32
    temperature, row_temperature = _temperature(temperature, shape, dtype)
    per_row = {"targets": targets, "active": active, "temperature": row_temperature}
    for name, array in per_row.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name}: expected {list(shape)} to match hidden {list(hidden.shape)}, got {list(array.shape)}"
            )
    # Flat copies must outlive the call: the views borrow them.
    flat = {name: None if array is None else _whole(array.reshape(-1)) for name, array in per_row.items()}
    bias = None if bias is None else _whole(bias)
    problem = _options.problem(
        hidden=_matrix("hidden", rows),
        weight=_matrix("weight", weight),
        bias=_vector("bias", bias),
        targets=_vector("targets", flat["targets"]),
        active=_vector("active", flat["active"]),
        row_temperature=_vector("temperature", flat["temperature"]),
        temperature=temperature,
        softcap=None if softcap is None else _options.number("softcap", softcap),
        logit_scale=_options.number("logit_scale", logit_scale),
        entropy=entropy,
        **options,
    )
    execution = _core.Execution()
    execution.backend = backend
    execution.set_check(None if check is None else bool(check))
    execution.set_workspace_budget(workspace_bytes)
    logprob = np.empty(shape, dtype)
    outputs = _core.ForwardOutputs()
    outputs.logprob = _output(logprob)
    if entropy == "off":
        _core.forward(problem, outputs, execution)
        return logprob
    entropies = np.empty(shape, dtype)
    outputs.entropy = _output(entropies)
    _core.forward(problem, outputs, execution)
    return logprob, entropies
