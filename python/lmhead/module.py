"""Module form of `lmhead.linear_logprobs`: an LM head that scores targets instead of returning logits."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from . import _options, linear_logprobs

# Options that belong to the head itself; the others may change from call to call.
_PER_CALL = frozenset({"active", "weight_main_grad"})


class LinearLogprobs(nn.Module):
    """LM head [V, H] with `forward(hidden, targets)` instead of logits.

    Its parameters are those of `torch.nn.Linear(hidden_size, vocab_size)`, by the same names, so checkpoints fit.
    Every option of `lmhead.linear_logprobs` can be given here as a default and overridden in a call.

    Args:
        hidden_size: H.
        vocab_size: V, the rows of this rank's weight (0 for an empty shard).
        bias: whether there is a bias [V].
        device, dtype: of the parameters.
        **options: defaults of `lmhead.linear_logprobs`, such as temperature, softcap, return_entropy.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        for name, size, least in (("hidden_size", hidden_size, 1), ("vocab_size", vocab_size, 0)):
            _options.integer(name, size)
            if size < least:
                raise ValueError(f"{name}: expected >= {least}, got {size}")
        weight = torch.empty(vocab_size, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_empty(vocab_size)) if bias else None
        self.options = self._checked(options)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Module, **options: Any) -> LinearLogprobs:
        """A head over the parameters of `linear` (an nn.Linear, or an nn.Embedding for a tied head): shared, not
        copied. TypeError for a module without such a weight."""
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise TypeError(
                "linear: expected a module with a weight [V, H], such as nn.Linear or nn.Embedding, got "
                f"{type(linear).__name__} with weight {got}"
            )
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.weight = weight
        head.bias = getattr(linear, "bias", None)
        head.options = cls._checked(options)
        return head

    @staticmethod
    def _checked(options: dict[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(linear_logprobs).parameters.values()
        known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"bias"} - _PER_CALL
        for name in options:
            if name not in known:
                raise TypeError(f"{name}: expected one of {', '.join(sorted(known))}, got an unknown option")
        return options

    def reset_parameters(self) -> None:
        """As torch.nn.Linear initialises."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1])
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """hidden [..., H], targets [...] -> logprob [...] or (logprob, entropy); see `lmhead.linear_logprobs`."""
        return linear_logprobs(hidden, self.weight, targets, bias=self.bias, **{**self.options, **options})

    def extra_repr(self) -> str:
        vocab_size, hidden_size = self.weight.shape
        parts = [f"hidden_size={hidden_size}", f"vocab_size={vocab_size}", f"bias={self.bias is not None}"]
        return ", ".join(parts + [f"{name}={value}" for name, value in self.options.items()])
