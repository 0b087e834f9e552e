"""Forward scoring of NumPy arrays, for programs that have no PyTorch."""

from __future__ import annotations

import numpy as np

from . import _core, _options


def _matrix(name: str, array: np.ndarray) -> _core.ConstMatrix:
    rows, cols = array.shape
    row_stride, col_stride = (s // array.itemsize for s in array.strides)
    if cols > 1 and col_stride != 1:
        raise ValueError(f"{name}: expected contiguous columns (stride 1), got stride {col_stride}")
    dtype = _options.dtype_of(name, array.dtype.name)
    return _core.ConstMatrix(array.ctypes.data, rows, cols, row_stride, dtype)


def _vector(name: str, array: np.ndarray | None) -> _core.ConstVector | None:
    if array is None:
        return None
    flat = array.reshape(-1)
    stride = flat.strides[0] // flat.itemsize
    return _core.ConstVector(flat.ctypes.data, flat.size, stride, _options.dtype_of(name, flat.dtype.name))


def _output(array: np.ndarray) -> _core.Vector:
    return _core.Vector(array.ctypes.data, array.size, 1, _options.DTYPES[array.dtype.name])


def _array(name: str, value: object) -> np.ndarray | None:
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):  # one element of an array
        return np.asarray(value)
    raise TypeError(f"{name}: expected numpy.ndarray like hidden, got {type(value).__name__}")


def linear_logprobs(
    hidden, weight, targets, *, bias, active, temperature, entropy, workspace_bytes, cache_bytes, check, backend, **options
):
    """See lmhead.linear_logprobs, whose options these are; without a backward cache_bytes has no use."""
    if entropy == "grad":
        raise NotImplementedError("entropy_requires_grad: expected torch tensors, got numpy.ndarray (forward only)")
    weight, targets = _array("weight", weight), _array("targets", targets)
    bias, active = _array("bias", bias), _array("active", active)
    if hidden.ndim < 1 or weight.ndim != 2:
        raise ValueError(
            f"weight: expected [V, H] for hidden [..., H], got {list(weight.shape)} and hidden {list(hidden.shape)}"
        )
    rows = hidden.reshape(-1, hidden.shape[-1]) if hidden.size else hidden.reshape(0, hidden.shape[-1])
    if rows.strides[1] != rows.itemsize and rows.shape[1] > 1:
        rows = np.ascontiguousarray(rows)
    shape = hidden.shape[:-1]
    row_temperature = None
    if isinstance(temperature, np.ndarray) and temperature.ndim:
        row_temperature = temperature.astype(np.promote_types(np.float32, temperature.dtype), copy=False)
        temperature = 1.0
    for name, vector in (("targets", targets), ("active", active), ("temperature", row_temperature)):
        if vector is not None and vector.shape != shape:
            raise ValueError(
                f"{name}: expected {list(shape)} to match hidden {list(hidden.shape)}, got {list(vector.shape)}"
            )
    # Flat copies of strided vectors must outlive the call: the views borrow them.
    vectors = {
        "targets": targets.reshape(-1),
        "bias": bias,
        "active": None if active is None else active.reshape(-1),
        "row_temperature": None if row_temperature is None else row_temperature.reshape(-1),
    }
    problem = _options.problem(
        hidden=_matrix("hidden", rows),
        weight=_matrix("weight", weight),
        **{name: _vector(name, v) for name, v in vectors.items()},
        temperature=float(temperature),
        entropy=entropy,
        **options,
    )
    execution = _core.Execution()
    execution.backend = backend
    execution.set_check(check)
    execution.set_workspace_budget(workspace_bytes)
    dtype = np.float64 if hidden.dtype == np.float64 else np.float32
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
