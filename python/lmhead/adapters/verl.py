"""verl: `linear_cross_entropy`, and the PPO head of its transformers models.

    from lmhead.adapters.verl import linear_cross_entropy     # verl.utils.kernel.linear_cross_entropy's
    lmhead.adapters.verl.install()                            # or replace it inside verl

Differences that a user may see: any H (verl's kernel needs H % 128 == 0), any device, entropy in fp32, no unwanted
gradient GEMM. With `dist_process_group` the gradient of `hidden` is this rank's part, as in verl.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import linear_logprobs
from ._parallel import equal_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FusedLinearForPPO", "install", "linear_cross_entropy"]

_REDUCTIONS = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of labels, both differentiable.

    hidden [..., H], weight [V, H] (this rank's equal shard with a group), labels [...]. Results are flat [N], as verl
    returns them; `reduction` "sum" or "mean" makes logprobs a scalar and leaves entropy as it is.
    """
    if reduction.lower() not in _REDUCTIONS:
        raise ValueError(f'reduction: expected "none", "sum" or "mean", got {reduction!r}')
    logprobs, entropy = linear_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        return_entropy=True,
        entropy_requires_grad=True,
        **equal_shards(weight, dist_process_group),
    )
    return _REDUCTIONS[reduction.lower()](logprobs.reshape(-1)), entropy.reshape(-1)


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of the same name: (log_probs, entropy) in the shape of input_ids."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [..., H], vocab_weights [V, H], input_ids [...]: the ids to score, already shifted."""
        return linear_logprobs(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=temperature,
            return_entropy=True,
            entropy_requires_grad=True,
        )


def install() -> list[str]:
    """Replaces `linear_cross_entropy` and `FusedLinearForPPO` in verl, wherever they were imported to.

    Returns the replaced names as "module.name". verl uses them with `actor.use_fused_kernels: true`.
    """
    import importlib

    ours = {"linear_cross_entropy": linear_cross_entropy, "FusedLinearForPPO": FusedLinearForPPO}
    hosts = {
        "linear_cross_entropy": "verl.utils.kernel.linear_cross_entropy",
        "FusedLinearForPPO": "verl.utils.experimental.torch_functional",
    }
    originals = {name: getattr(importlib.import_module(host), name) for name, host in hosts.items()}
    replaced = []
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("verl.") or module is None:
            continue
        for name, original in originals.items():
            if vars(module).get(name) is original and original is not ours[name]:
                setattr(module, name, ours[name])
                replaced.append(f"{module_name}.{name}")
    return replaced
