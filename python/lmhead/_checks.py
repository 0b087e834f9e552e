"""Checks of tensor arguments that the scoring calls share, each with its one message.

Shapes, strides and devices are checked here, before PyTorch's operators see them; dtypes and values by the C++ library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _options


def tensor(name: str, value: Any, hidden: Tensor) -> None:
    """A plain tensor on the device of hidden."""
    if not isinstance(value, Tensor):
        like = "" if name == "hidden" else " like hidden"
        raise TypeError(f"{name}: expected torch.Tensor{like}, got {type(value).__name__}")
    if hasattr(value, "full_tensor") and hasattr(value, "placements"):
        raise TypeError(
            f"{name}: expected a plain torch.Tensor, got a DTensor (FSDP2 or tensor parallel). Gather it with "
            f"{name}.full_tensor(), or call inside the sharded module's forward, or pass {name}.to_local() "
            "with vocab_start, vocab_size and group for rows sharded over the vocabulary"
        )
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else value.layout
        raise TypeError(f"{name}: expected a dense torch.Tensor, got {kind}")
    if value.device != hidden.device:
        raise ValueError(f"{name}: expected a tensor on {hidden.device} like hidden, got {value.device}")
    # An operator without a forward-mode formula would drop the tangent without a word.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{name}: expected reverse-mode autograd (backward, torch.autograd.grad), got a tensor of forward-mode "
            "autograd (torch.func.jvp, jacfwd or forward_ad.make_dual), which has no formula here"
        )


def head(hidden: Any, weight: Any, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """hidden [..., H] on a device that has a backend, weight [V, H] with contiguous columns, more tensors beside them."""
    tensor("hidden", hidden, hidden)
    if hidden.device.type not in ("cpu", "cuda"):
        raise ValueError(f"hidden: expected a tensor on the CPU or a CUDA device, got {hidden.device}")
    for name, value in {"weight": weight, **required}.items():
        tensor(name, value, hidden)
    for name, value in optional.items():
        if value is not None:
            tensor(name, value, hidden)
    if hidden.dim() < 1 or weight.dim() != 2:
        hint = " (a sharded or flattened parameter? gather it first)" if weight.dim() == 1 else ""
        raise ValueError(
            f"weight: expected [V, H] for hidden [..., H], got {list(weight.shape)} "
            f"and hidden {list(hidden.shape)}{hint}"
        )
    bias = optional.get("bias")
    if bias is not None and bias.dim() != 1:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError(
            f"weight: expected contiguous columns (stride 1 along H), got strides {tuple(weight.stride())}; "
            "a copy would double the largest tensor: pass weight.contiguous() if that is meant"
        )


def number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(f"{name}: expected no gradient (it gets none), got a tensor that requires grad")
        if value.numel() != 1 or value.device.type != "cpu":
            raise TypeError(f"{name}: expected a number, got a tensor {list(value.shape)} on {value.device}")
        real(name, value)
        return float(value)
    return _options.number(name, value)


def real(name: str, value: Tensor) -> None:
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected real numbers, got {str(value.dtype).removeprefix('torch.')}")


def temperature(value: float | Tensor, hidden: Tensor) -> tuple[float, Tensor | None]:
    """(number, None), or (1.0, tensor) for a tensor of one per row or on the device of hidden."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
        return number("temperature", value), None
    tensor("temperature", value, hidden)
    real("temperature", value)
    if value.requires_grad:
        raise ValueError("temperature: expected no gradient (it gets none), got a tensor that requires grad")
    return 1.0, value


def rows(
    hidden: Tensor, named: dict[str, Tensor | None], shape: torch.Size | None = None, why: str = "to match"
) -> None:
    """One element a row of hidden each, or of `shape`; one temperature for all rows is allowed."""
    shape = hidden.shape[:-1] if shape is None else shape
    for name, value in named.items():
        if value is None or value.shape == shape or (name == "temperature" and value.numel() == 1):
            continue
        raise ValueError(f"{name}: expected {list(shape)} {why} hidden {list(hidden.shape)}, got {list(value.shape)}")


def id_lists(name: str, ids: Tensor, hidden: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """[..., K] ids, a list a row of hidden."""
    if ids.dtype not in dtypes:
        expected, got = (", ".join(str(d).removeprefix("torch.") for d in ds) for ds in (dtypes, (ids.dtype,)))
        raise TypeError(f"{name}: expected {expected.replace(', ', ' or ')}, got {got}")
    shape = hidden.shape[:-1]
    if ids.dim() != hidden.dim() or ids.shape[:-1] != shape:
        expected = ", ".join([*map(str, shape), "K"])
        raise ValueError(f"{name}: expected [{expected}] to match hidden {list(hidden.shape)}, got {list(ids.shape)}")


def group(value: Any, vocab_size: int | None) -> None:
    if value is not None and vocab_size is None:
        raise ValueError("vocab_size: expected the global vocabulary, required with group, got None")


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What products are rounded to under autocast; None outside it and for fp64."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
