"""Hugging Face transformers: loss and per-token log-probs of a causal LM without logits.

    model = lmhead.adapters.transformers.patch(AutoModelForCausalLM.from_pretrained(...))
    out = model(input_ids=ids, labels=labels)       # out.loss as before; out.log_probs [B, S - 1]; out.logits is None

Calls without labels (generation, evaluation of logits) run the model's own forward.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import linear_logprobs

__all__ = ["CausalLMOutputWithLogprobs", "head_options", "patch", "unpatch"]


@dataclass
class CausalLMOutputWithLogprobs(CausalLMOutputWithPast):
    """CausalLMOutputWithPast with per-token results instead of logits.

    log_probs: [B, S - 1] fp32; log_probs[:, i] is log p(labels[:, i + 1]), 0 where that label is ignored. [B, S] and
        unshifted when shift_labels were given.
    entropy: the same shape, with `patch(return_entropy=True)`.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def head_options(config: Any) -> dict[str, Any]:
    """softcap and logit_scale of a model's head, from the fields by which the model families name them."""
    config = config.get_text_config()
    options: dict[str, Any] = {"softcap": getattr(config, "final_logit_softcapping", None) or None}
    scale = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse; Falcon-H1
        scale = getattr(config, name, None) if scale is None else scale
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        # Granite and MiniCPM divide by it, HyperCLOVA X multiplies.
        scaling = config.logits_scaling
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    options["logit_scale"] = 1.0 if scale is None else float(scale)
    return options


def patch(
    model: PreTrainedModel,
    *,
    return_entropy: bool = False,
    entropy_requires_grad: bool = False,
    verify: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Makes `model(..., labels=labels)` compute its loss through lmhead, in place; returns the model.

    Labels are shifted once, as the model itself does; `shift_labels` are taken as they are; `num_items_in_batch` and
    `ignore_index` mean what they mean in transformers. A batch without any label has loss 0.

    Args:
        model: a causal LM whose head is a linear layer on its base model's last hidden state.
        return_entropy, entropy_requires_grad: as in lmhead.linear_logprobs; the output's `entropy`.
        verify: run the model once on four tokens and compare its logits with the head that lmhead computes. Turn it off
            for a model without weights yet, or one that cannot run on bare token ids.
        **options: of lmhead.linear_logprobs, such as temperature, softcap, logit_scale (by default from the config).

    Raises:
        NotImplementedError: the model's loss, or its logits, are not what lmhead computes.
    """
    if "forward" in vars(model):
        raise ValueError(f"model: expected {type(model).__name__}'s own forward, got one that is patched already")
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise NotImplementedError(
            f"model: expected transformers' ForCausalLMLoss as loss_function, got {model.loss_function}"
        )
    _head(model)
    options = {**head_options(model.config), **options}
    if verify:
        _verify(model, options)
    entropy = {"return_entropy": return_entropy, "entropy_requires_grad": entropy_requires_grad}
    original = model.forward

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(self: PreTrainedModel, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        shift_labels = kwargs.get("shift_labels")
        if labels is None and shift_labels is None:
            return original(*args, **kwargs)
        kwargs.pop("shift_labels", None)
        return _fused_forward(self, args, labels, shift_labels, kwargs, {**options, **entropy})

    model.forward = types.MethodType(forward, model)
    return model


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the model its own forward back."""
    vars(model).pop("forward", None)
    return model


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise NotImplementedError(f"model: expected torch.nn.Linear as its head, got {type(head).__name__}")
    return head


def _fused_forward(
    model: PreTrainedModel,
    args: tuple[Any, ...],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    config = model.config.get_text_config()
    if kwargs.pop("logits_to_keep", 0):
        raise NotImplementedError("logits_to_keep: expected 0 together with labels, got another value")
    if kwargs.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise NotImplementedError("output_router_logits: expected False, got True (the auxiliary loss is not computed)")
    num_items = kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    return_dict = kwargs.pop("return_dict", None)
    outputs = model.base_model(*args, **kwargs, return_dict=True)
    head = _head(model)
    hidden = outputs.last_hidden_state.to(head.weight.device)
    # The last position predicts nothing: an ignored target spares its row and a copy of the other rows.
    targets = shift_labels if labels is None or shift_labels is not None else nn.functional.pad(
        labels[..., 1:], (0, 1), value=ignore_index
    )  # fmt: skip
    targets = targets.to(hidden.device)
    result = linear_logprobs(hidden, head.weight, targets, bias=head.bias, ignore_index=ignore_index, **options)
    log_probs, entropy = result if options["return_entropy"] else (result, None)
    items = (targets != ignore_index).sum().clamp(min=1) if num_items is None else num_items
    loss = -log_probs.sum() / (items.to(hidden.device) if isinstance(items, Tensor) else items)
    if shift_labels is None:
        log_probs, entropy = log_probs[..., :-1], None if entropy is None else entropy[..., :-1]
    output = CausalLMOutputWithLogprobs(
        loss=loss,
        log_probs=log_probs,
        entropy=entropy,
        **{name: outputs.get(name) for name in _CARRIED if name in outputs},
    )
    wants_dict = model.config.return_dict if return_dict is None else return_dict
    return output if wants_dict else output.to_tuple()


# What a causal LM's output takes over from its base model; the key-value cache has had two names.
_CARRIED = tuple(
    name for name in ("past_key_values", "cache", "hidden_states", "attentions")
    if name in CausalLMOutputWithPast.__dataclass_fields__
)  # fmt: skip


@torch.no_grad()
def _verify(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Compares the model's own logits with lmhead's head on four tokens."""
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _m, _i, output: seen.append(output[0]))
    try:
        ids = torch.arange(4, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits.float()
    finally:
        hook.remove()
    head = _head(model)
    options = {name: value for name, value in options.items() if name != "temperature"}
    best = logits.argmax(-1)
    hidden = seen[-1].to(head.weight.device)
    got = linear_logprobs(hidden, head.weight, best.to(hidden.device), bias=head.bias, **options)
    want = torch.log_softmax(logits, -1).gather(-1, best[..., None])[..., 0].to(got.device)
    error = float((got - want).abs().max())
    # The model's logits are rounded to its own dtype, to which the head's result is not.
    rounding = 4 * torch.finfo(model.dtype).eps * float(logits.abs().max()) + 1e-4
    if not error <= rounding:
        raise NotImplementedError(
            f"model: expected logits = head(last_hidden_state) with {options}, got log-probs that differ by {error:.3g} "
            f"(more than {rounding:.3g}); pass the softcap or logit_scale that {type(model).__name__} applies"
        )
