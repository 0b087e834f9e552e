"""Active rows: the same bits where the mask is set, exact zeros elsewhere, and the gradients of the dense call."""

from __future__ import annotations

import pytest
import torch

import lmhead

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def head(rows, h=128, v=256, dtype=torch.float32, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, h, generator=g).to(device, dtype)
    weight = (torch.randn(v, h, generator=g) * 2 / h**0.5).to(device, dtype)
    return hidden, weight, torch.randint(0, v, (rows,), generator=g).to(device)


def exact(hidden, weight, targets, a, e, out_of_vocab=False, offset=None):
    """fp64 gradients of sum(a logprob + e entropy)."""
    x, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = x @ w.T if offset is None else x @ w.T + offset.double()
    logp = torch.log_softmax(logits, -1)
    inside = (targets >= 0) & (targets < weight.shape[0])
    # "zero" keeps the softmax part of an id outside the vocabulary: d/dz of -lse.
    picked = torch.where(
        inside, logp.gather(1, targets.clamp(0, weight.shape[0] - 1)[:, None])[:, 0], -torch.logsumexp(logits, -1)
    )
    (picked * a + -(logp.exp() * logp).sum(1) * e).sum().backward()
    return x.grad, w.grad


CASES = {
    "skyrl 3x192, inactive 0..255 and 300..331": (576, lambda m: [m[:256].zero_(), m[300:332].zero_()]),
    "257 rows, inactive 37..150 and from 219": (257, lambda m: [m[37:151].zero_(), m[219:].zero_()]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_of_vocab", [False, True], ids=["inside", "out_of_vocab"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64], ids=str)
def test_masked_equals_dense(case, dtype, out_of_vocab, mask_dtype, device):
    rows, clear = CASES[case]
    hidden, weight, targets = head(rows, dtype=dtype, device=device)
    mask = torch.ones(rows, dtype=torch.bool, device=device)
    clear(mask)
    if out_of_vocab:
        targets[5::17] += weight.shape[0]
    g = torch.Generator().manual_seed(1)
    a, e = torch.randn(2, rows, generator=g).to(device)
    options = dict(return_entropy=True, entropy_requires_grad=True, out_of_vocab="zero")
    dense, dense_entropy = lmhead.linear_logprobs(hidden, weight, targets, **options)
    # What inactive rows hold must not matter.
    x = hidden.masked_fill(~mask[:, None], torch.nan).requires_grad_()
    w = weight.clone().requires_grad_()
    y = targets.masked_fill(~mask, -7)
    logprob, entropy = lmhead.linear_logprobs(x, w, y, active=mask.to(mask_dtype), **options)
    assert torch.equal(logprob, torch.where(mask, dense, 0.0))
    assert torch.equal(entropy, torch.where(mask, dense_entropy, 0.0))
    (logprob * a + entropy * e).sum().backward()
    dx, dw = exact(hidden, weight, targets, a * mask, e * mask)
    assert x.grad[~mask].abs().sum() == 0
    for got, want in ((x.grad, dx), (w.grad, dw)):
        error = (got.double() - want).norm() / want.norm()
        assert error <= (4e-3 if dtype == torch.bfloat16 else 2e-6), error


@pytest.mark.parametrize("device", DEVICES)
def test_half_masked_with_logits_near_minus_120(device):
    hidden, weight, targets = head(64, device=device)
    bias = torch.full((weight.shape[0],), -120.0, device=device)
    mask = torch.arange(64, device=device) % 2 == 0
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprob, entropy = lmhead.linear_logprobs(
        x, w, targets, bias=bias, active=mask, return_entropy=True, entropy_requires_grad=True
    )
    (logprob + entropy).sum().backward()
    dx, dw = exact(hidden, weight, targets, mask.double(), mask.double(), offset=bias)
    want = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprob[mask].double(), want[mask], rtol=1e-5, atol=4e-5)
    for got, reference in ((x.grad, dx), (w.grad, dw)):
        assert (got.double() - reference).norm() <= 1e-4 * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_active(device):
    hidden, weight, targets = head(9, device=device)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    logprob, entropy = lmhead.linear_logprobs(
        x, w, targets, active=torch.zeros(9, dtype=torch.int32, device=device), return_entropy=True, entropy_requires_grad=True
    )
    (logprob + entropy).sum().backward()
    assert all(t.abs().sum() == 0 for t in (logprob, entropy, x.grad, w.grad))


def test_bad_masks_are_errors():
    hidden, weight, targets = head(9)
    for dtype in (torch.float32, torch.complex64):
        with pytest.raises(TypeError, match="active: expected"):
            lmhead.linear_logprobs(hidden, weight, targets, active=torch.ones(9).to(dtype))
    with pytest.raises(ValueError, match=r"active: expected \[9\]"):
        lmhead.linear_logprobs(hidden, weight, targets, active=torch.ones(8, dtype=torch.bool))
    with pytest.raises(ValueError, match="active: expected a tensor on cpu like hidden, got meta"):
        lmhead.linear_logprobs(hidden, weight, targets, active=torch.ones(9, dtype=torch.bool, device="meta"))
