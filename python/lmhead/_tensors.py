"""A scoring call over PyTorch tensors, as the operators share it: views for the extension, workspace and stream.

Tensors cross into the extension as address, sizes, strides, dtype, device and stream, so one build serves every
PyTorch version. Results and workspace come from PyTorch's allocator, on the current stream of the tensors' device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from . import _core, _options

# Numbers of a partial-softmax state.
STATE_WIDTH = 4


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str, tensor: Tensor) -> _core.DType:
    return _options.dtype_of(name, dtype_name(tensor.dtype))


def rows(tensor: Tensor) -> Tensor:
    """[..., H] as [N, H] with contiguous columns: a view where strides allow it, else a copy."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty((0, tensor.shape[-1]))
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1] or rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows


def matrix(name: str, tensor: Tensor) -> _core.ConstMatrix:
    return _core.ConstMatrix(
        tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0), _dtype(name, tensor)
    )


def vector(name: str, flat: Tensor | None) -> _core.ConstVector | None:
    if flat is None:
        return None
    return _core.ConstVector(flat.data_ptr(), flat.shape[0], flat.stride(0), _dtype(name, flat))


def output_vector(flat: Tensor) -> _core.Vector:
    return _core.Vector(flat.data_ptr(), flat.shape[0], flat.stride(0), _dtype("output", flat))


def output_matrix(tensor: Tensor) -> _core.Matrix:
    return _core.Matrix(tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0), _dtype("output", tensor))


def flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1)


def result_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class Call:
    """A problem and how to run it. Holds the tensors that the extension's views borrow."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        active: Tensor | None,
        row_temperature: Tensor | None,
        options: dict[str, Any],
    ):
        self.hidden, self.weight, self.bias = rows(hidden), weight, bias
        self.targets, self.active, self.row_temperature = flat(targets), flat(active), row_temperature
        self.result_dtype = result_dtype(hidden)
        self.device = hidden.device
        if row_temperature is not None:
            t = row_temperature.to(self.result_dtype)
            # One for all rows needs no copy: stride 0.
            self.row_temperature = t.reshape(1).expand(self.hidden.shape[0]) if t.numel() == 1 else t.reshape(-1)
        compute = options["compute_dtype"]
        self.problem = _options.problem(
            hidden=matrix("hidden", self.hidden),
            weight=matrix("weight", weight),
            bias=vector("bias", bias),
            targets=vector("targets", self.targets),
            active=vector("active", self.active),
            row_temperature=vector("temperature", self.row_temperature),
            compute_dtype=None if compute is None else _options.dtype_of("compute_dtype", dtype_name(compute)),
            inference_only=False,
            **{
                name: options[name]
                for name in (
                    "temperature", "softcap", "logit_scale", "ignore_index", "out_of_vocab", "valid_vocab",
                    "vocab_start", "vocab_size", "entropy",
                )
            },
        )  # fmt: skip
        self.execution = _core.Execution()
        self.execution.backend = options["backend"]
        self.execution.set_check(options["check"])
        self.execution.set_workspace_budget(options["workspace_bytes"])
        self._workspace: Tensor | None = None
        if self.device.type == "cuda":
            self.execution.set_device(_core.Device.cuda)
            self.execution.set_stream(torch.cuda.current_stream(self.device).cuda_stream)
            self.execution.set_allow_tf32(torch.backends.cuda.matmul.allow_tf32)

    def results(self, shape: torch.Size, with_entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Room for log-prob, entropy and lse. In their final shape: what an operator returns may not be a view, or its
        caller could not change it in place."""
        shapes = (shape, shape if with_entropy else torch.Size((0,)), shape)
        return tuple(torch.empty(s, dtype=self.result_dtype, device=self.device) for s in shapes)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def reserve_workspace(self, operation: _core.Operation, gradients: _core.BackwardOutputs | None = None) -> None:
        """On the GPU from PyTorch's allocator; on the CPU the library allocates for itself."""
        size = _core.workspace_size(self.problem, operation, gradients or _core.BackwardOutputs(), self.execution)
        self.set_workspace(size)

    def set_cache(self, cache: Tensor | None) -> None:
        if cache is not None and cache.numel():
            self.execution.set_cache(cache.data_ptr(), cache.numel())

    def set_workspace(self, size: int) -> None:
        if self.device.type == "cuda" and size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.execution.set_workspace(self._workspace.data_ptr(), size)


def gradient_like(tensor: Tensor | None, needed: bool, hidden: Tensor) -> Tensor:
    """Contiguous; where none is needed an empty tensor of its own, since operators may not return one tensor twice."""
    return tensor.new_empty(tensor.shape) if needed else hidden.new_empty(0, dtype=torch.float32)


def upstream(gradient: Tensor | None, call: Call) -> Tensor | None:
    """Any stride, also the 0 of an expanded scalar, is read as it is."""
    return None if gradient is None else gradient.to(call.result_dtype).reshape(-1)


def no_double_backward(ctx, *_):
    raise NotImplementedError(
        "lmhead.linear_logprobs: expected one backward through it, got a second derivative (create_graph=True), "
        "which it does not have"
    )
