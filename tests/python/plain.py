"""The plain way, in fp64 through the whole logits: what every result is compared with."""

import torch


def logprobs_and_entropy(
    hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100,
    out_of_vocab="error", valid_vocab=None, active=None, compute_dtype=None,
):  # fmt: skip
    """(logprob, entropy) [...] fp64, differentiable."""
    if compute_dtype is not None:
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
    elif hidden.dtype != torch.float64:
        hidden = hidden.to(weight.dtype)
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor) and temperature.dim():
        temperature = temperature.double()[..., None]
    logits = logits / temperature
    if valid_vocab is not None:
        logits = logits[..., :valid_vocab]
    logp = torch.log_softmax(logits, -1)
    ids = targets.long()
    known = (ids >= 0) & (ids < logp.shape[-1])
    picked = logp.gather(-1, ids.where(known, 0)[..., None])[..., 0]
    if out_of_vocab == "zero":
        # logprob 0, but the softmax part of the gradient stays: -lse and what makes it 0 as a constant.
        lse = torch.logsumexp(logits, -1)
        picked = torch.where(known, picked, lse.detach() - lse)
    computed = ids != ignore_index
    if active is not None:
        computed = computed & (active > 0)
    entropy = -(logp.exp() * torch.where(logp.isinf(), 0.0, logp)).sum(-1)
    return torch.where(computed, picked, 0.0), torch.where(computed, entropy, 0.0)


def relative(got, want):
    """Relative Frobenius error."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def largest(got, want):
    """Largest absolute difference; NaN stays NaN, so `not (largest(...) <= tol)` catches it."""
    return float((got.detach().double() - want.detach().double()).abs().max()) if want.numel() else 0.0
