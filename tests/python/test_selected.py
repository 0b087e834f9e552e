"""Log-probs of selected ids: against torch's log_softmax and its autograd."""

from __future__ import annotations

import pytest
import torch

import lmhead

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()

N, H, V, K = 41, 64, 3000, 6


def problem(dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * 4 / H**0.5).to(dtype)
    bias = torch.randn(V, generator=g).to(dtype)
    ids = torch.randint(0, V, (N, K), generator=g)
    targets = torch.randint(0, V, (N,), generator=g)
    ids[3, 1] = ids[3, 0]  # repeated
    ids[4, 2] = targets[4]  # the target itself
    ids[5, 1:] = -1  # padding
    targets[6] = -100
    return tuple(t.to(device) for t in (hidden, weight, bias, targets, ids))


def plain(hidden, weight, bias, targets, ids, temperature):
    logp = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    live = targets != -100
    logprob = torch.where(live, logp.gather(1, targets.clamp_min(0)[:, None])[:, 0], 0.0)
    selected = torch.where(live[:, None] & (ids >= 0), logp.gather(1, ids.clamp_min(0)), 0.0)
    return logprob, selected, torch.where(live, -(logp.exp() * logp).sum(1), 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_gradients(dtype, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 runs on the CPU only")
    hidden, weight, bias, targets, ids = problem(dtype, device)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    exact = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    g = torch.Generator().manual_seed(1)
    a, e = torch.randn(2, N, generator=g, dtype=torch.float64).to(device)
    s = torch.randn(N, K, generator=g, dtype=torch.float64).to(device)
    logprob, selected, entropy = lmhead.selected_logprobs(
        leaves[0], leaves[1], targets, ids, bias=leaves[2], temperature=0.8, return_entropy=True,
        entropy_requires_grad=True,
    )  # fmt: skip
    want = plain(*exact, targets, ids, 0.8)
    for got, reference in zip((logprob, selected, entropy), want):
        torch.testing.assert_close(got.double(), reference, rtol=1e-5, atol=1e-5)
    assert selected[4, 2] == logprob[4] and selected[5, 1] == 0 and selected[6].abs().sum() == 0
    (logprob * a).sum().add((selected * s).sum()).add((entropy * e).sum()).backward()
    (want[0] * a).sum().add((want[1] * s).sum()).add((want[2] * e).sum()).backward()
    for leaf, reference in zip(leaves, exact):
        error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
        # bf16: dl and the gradient are each rounded once.
        assert error <= (5e-6 if dtype == torch.float32 else 1e-12 if dtype == torch.float64 else 4e-3), error


def test_the_same_bits_as_linear_logprobs():
    hidden, weight, bias, targets, ids = problem()
    logprob, selected, entropy = lmhead.selected_logprobs(hidden, weight, targets, ids, bias=bias, return_entropy=True)
    want, want_entropy = lmhead.linear_logprobs(hidden, weight, targets, bias=bias, return_entropy=True)
    assert torch.equal(logprob, want) and torch.equal(entropy, want_entropy)


def test_distillation_loss_without_the_targets():
    """Only `selected` is used: the forward-KL gradient of a top-k teacher."""
    hidden, weight, _, targets, ids = problem()
    ids = ids.clamp_min(0)
    teacher = torch.rand(N, K, generator=torch.Generator().manual_seed(3))
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    _, selected = lmhead.selected_logprobs(x, w, torch.zeros(N, dtype=torch.int32), ids.int())
    (-teacher * selected).sum().backward()
    x2, w2 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    (-teacher * torch.log_softmax(x2 @ w2.T, -1).gather(1, ids)).sum().backward()
    torch.testing.assert_close(x.grad.double(), x2.grad, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(w.grad.double(), w2.grad, rtol=2e-5, atol=2e-5)


def test_compile_full_graph():
    hidden, weight, _, targets, ids = problem()

    def loss(x, w):
        logprob, selected = lmhead.selected_logprobs(x, w, targets, ids)
        return logprob.sum() + selected.sum()

    results = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        fn(x, w).backward()
        results.append((x.grad, w.grad))
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_bad_input_names_the_argument():
    hidden, weight, _, targets, ids = problem()
    with pytest.raises(TypeError, match="ids: expected int32 or int64, got int16"):
        lmhead.selected_logprobs(hidden, weight, targets, ids.short())
    with pytest.raises(ValueError, match=r"ids: expected \[41, K\]"):
        lmhead.selected_logprobs(hidden, weight, targets, ids[:-1])
    ids[7, 2] = V
    with pytest.raises(ValueError, match="ids: expected ids in .0, 3000. or -1 as padding, got 3000 at row 7, column 2"):
        lmhead.selected_logprobs(hidden, weight, targets, ids)
