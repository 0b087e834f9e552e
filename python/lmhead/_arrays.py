"""Arguments that may be lists, NumPy arrays or torch tensors, without importing torch to find out."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_torch(value: Any) -> bool:
    return hasattr(value, "data_ptr")


def is_array(value: Any) -> bool:
    return is_torch(value) or isinstance(value, np.ndarray)


def integers(name: str, values: Any) -> np.ndarray:
    """A contiguous int64 vector of `values`; bools and floats are a TypeError, anything but a vector a ValueError."""
    if is_torch(values):
        values = values.detach().cpu().numpy()
    elif not isinstance(values, (np.ndarray, list, tuple, range)):
        try:
            values = list(values)
        except TypeError:
            raise TypeError(f"{name}: expected a sequence of integers, got {type(values).__name__}") from None
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: expected a flat sequence of integers, got a ragged one") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        found = "integers beyond 64 bits" if array.dtype.kind == "O" else array.dtype.name
        raise (ValueError if array.dtype.kind == "O" else TypeError)(f"{name}: expected integers, got {found}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a vector, got shape {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers within 64 bits, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)


def integer(name: str, value: Any) -> int:
    """`value` as an int; bools and floats are a TypeError, values beyond 64 bits a ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = value.__index__()
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer within 64 bits, got {number}")
    return number


def mask_bytes(name: str, mask: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A bool or integer mask as contiguous uint8, 1 where mask > 0. Other dtypes: TypeError; another shape: ValueError."""
    if is_torch(mask):
        if mask.is_floating_point() or mask.is_complex():  # some of them NumPy does not know
            raise TypeError(f"{name}: expected bool or integers, got {mask.dtype}")
        mask = mask.detach().cpu().numpy()
    array = np.asarray(mask)
    if array.size == 0:
        array = array.astype(bool)
    if array.dtype.kind not in "biu":
        raise TypeError(f"{name}: expected bool or integers, got {array.dtype.name}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name}: expected {list(shape)}, got {list(array.shape)}")
    return np.ascontiguousarray(array > 0, dtype=np.uint8)


def take(values: Any, rows: np.ndarray, fill: Any = 0) -> Any:
    """values[rows], with `fill` where rows < 0. Keeps dtype and device; differentiable for torch tensors."""
    absent = rows < 0
    if is_torch(values):
        import torch

        index = torch.from_numpy(np.where(absent, 0, rows)).to(values.device)
        if values.shape[0] == 0:  # nothing to read: all rows are absent
            return values.new_full((rows.size, *values.shape[1:]), fill)
        picked = values.index_select(0, index)
        if not absent.any():
            return picked
        mask = torch.from_numpy(absent).to(values.device).reshape(-1, *[1] * (values.dim() - 1))
        return picked.masked_fill(mask, fill)
    values = np.asarray(values)
    if values.shape[0] == 0:
        return np.full((rows.size, *values.shape[1:]), fill, dtype=values.dtype)
    picked = values[np.where(absent, 0, rows)]
    picked[absent] = fill
    return picked
