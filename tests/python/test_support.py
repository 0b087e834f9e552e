"""Candidate sets: against a dense fp64 definition, its gradients, padding, empty sets, compile."""

from __future__ import annotations

import pytest
import torch

import lmhead

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()

N, H, V = 37, 64, 512


def problem(k=8, dtype=torch.float32, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * 3 / H**0.5).to(dtype)
    ids = torch.randint(0, V, (N, k), generator=g, dtype=torch.int32)
    ids[torch.rand(N, k, generator=g) < 0.3] = -1
    ids[:, 0] = torch.randint(0, V, (N,), generator=g, dtype=torch.int32)
    ids[3] = -1  # an empty set
    if k > 1:
        ids[5, 1] = ids[5, 0]  # a duplicate
    sampled = ids[:, 0].long().clamp_min(0)
    sampled[7] = (ids[7].max().item() + 1) % V  # outside its set
    return tuple(t.to(device) for t in (hidden, weight, ids, sampled))


def dense(hidden, weight, ids, sampled, temperature=1.0, bias=None, softcap=None):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    member = torch.zeros(logits.shape, dtype=torch.bool, device=ids.device).scatter_add(1, ids.clamp_min(0).long(), ids >= 0)
    valid = member.any(1)
    lse = logits.masked_fill(~member, -torch.inf).logsumexp(1)
    lse = torch.where(valid, lse, 0.0)
    logprob = torch.where(valid, logits.gather(1, sampled[:, None])[:, 0] - lse, 0.0)
    log_p = torch.where(member, logits - lse[:, None], 0.0)
    return logprob, -(torch.where(member, log_p.exp(), 0.0) * log_p).sum(1), valid


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 8, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_and_gradients_against_the_dense_definition(k, dtype, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 runs on the CPU only")
    hidden, weight, ids, sampled = problem(k, dtype, device=device)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    exact = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    g = torch.Generator().manual_seed(2)
    a, e = torch.randn(2, N, generator=g, dtype=torch.float64).to(device)
    logprob, entropy, valid = lmhead.support_logprobs(
        leaves[0], leaves[1], ids, sampled, bias=leaves[2], temperature=0.7, softcap=9.0, entropy_requires_grad=True,
        return_valid=True,
    )  # fmt: skip
    want, want_entropy, want_valid = dense(exact[0], exact[1], ids, sampled, 0.7, exact[2], 9.0)
    tight = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(logprob.double(), want, **tight)
    torch.testing.assert_close(entropy.double(), want_entropy, **tight)
    assert torch.equal(valid, want_valid)
    (logprob * a + entropy * e).sum().backward()
    (want * a + want_entropy * e).sum().backward()
    for leaf, reference in zip(leaves, exact):
        if dtype in (torch.bfloat16, torch.float16):  # fp32 sums, rounded once
            error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
            floor = (reference.grad.to(dtype).double() - reference.grad).norm() / reference.grad.norm()
            assert error <= 1.25 * floor
        else:
            torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-5, atol=4e-6)


def test_entropy_is_a_metric_unless_asked():
    hidden, weight, ids, sampled = problem()
    logprob, entropy = lmhead.support_logprobs(hidden.requires_grad_(), weight, ids, sampled)
    assert logprob.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_backward_repeats_bit_for_bit_and_leading_dims_do_not_matter(device):
    hidden, weight, ids, sampled = problem(16, device=device)
    grads = []
    for shape in ((N,), (1, N), (N, 1)):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprob, entropy = lmhead.support_logprobs(
            x.view(*shape, H), w, ids.view(*shape, -1), sampled.view(shape).int(), entropy_requires_grad=True
        )
        assert logprob.shape == shape
        (logprob - 0.1 * entropy).sum().backward()
        grads.append((x.grad, w.grad))
    for x, w in grads[1:]:
        assert torch.equal(x, grads[0][0]) and torch.equal(w, grads[0][1])


def test_empty_sets():
    hidden, weight, ids, sampled = problem()
    logprob, entropy = lmhead.support_logprobs(hidden, weight, ids, sampled)
    assert logprob[3] == 0 and entropy[3] == 0
    with pytest.raises(ValueError, match="expected a candidate in every active row, got none in row 3"):
        lmhead.support_logprobs(hidden, weight, ids, sampled, empty_support="error")
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    full, entropy = lmhead.support_logprobs(x, w, ids, sampled, empty_support="full", temperature=0.7)
    whole = torch.log_softmax((hidden.double() @ weight.double().T) / 0.7, -1)
    torch.testing.assert_close(full[3].double(), whole[3, sampled[3]], rtol=1e-5, atol=4e-6)
    assert entropy[3] == 0
    full[3].backward()
    assert x.grad[3].abs().sum() > 0 and x.grad[4].abs().sum() == 0
    ids[4] = -1
    trajectories = torch.zeros(N, dtype=torch.int64)
    trajectories[4:] = 1
    lmhead.support_logprobs(hidden, weight, ids, sampled, empty_support="full", trajectory_ids=trajectories)
    with pytest.raises(ValueError, match="expected at most one loss-active row .* got 2 in trajectory 0"):
        lmhead.support_logprobs(
            hidden, weight, ids, sampled, empty_support="full", trajectory_ids=torch.zeros(N, dtype=torch.int64)
        )
    # A row outside the loss does not count.
    active = torch.ones(N, dtype=torch.bool)
    active[4] = False
    lmhead.support_logprobs(
        hidden, weight, ids, sampled, empty_support="full", active=active,
        trajectory_ids=torch.zeros(N, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_bad_input_names_the_argument(device):
    hidden, weight, ids, sampled = problem(device=device)
    with pytest.raises(TypeError, match="support_ids: expected int32, got int64"):
        lmhead.support_logprobs(hidden, weight, ids.long(), sampled)
    with pytest.raises(ValueError, match=r"support_ids: expected \[37, 'K'\].*got \[36, 8\]"):
        lmhead.support_logprobs(hidden, weight, ids[1:], sampled)
    with pytest.raises(ValueError, match=r"sampled_ids: expected \[37\]"):
        lmhead.support_logprobs(hidden, weight, ids, sampled[1:])
    bad = ids.clone()
    bad[2, 1] = V
    with pytest.raises(ValueError, match="support_ids: expected ids in .0, 512. or -1 as padding, got 512 at row 2, column 1"):
        lmhead.support_logprobs(hidden, weight, bad, sampled, check=True)
    with pytest.raises(ValueError, match="empty_support: expected one of zero, full, error, got 'maybe'"):
        lmhead.support_logprobs(hidden, weight, ids, sampled, empty_support="maybe")


def test_compile_full_graph():
    hidden, weight, ids, sampled = problem()

    def loss(x, w):
        logprob, entropy = lmhead.support_logprobs(x, w, ids, sampled, entropy_requires_grad=True)
        return (logprob - 0.1 * entropy).sum()

    results = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        fn(x, w).backward()
        results.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_operator_contract():
    hidden, weight, ids, sampled = problem()
    from lmhead import support

    torch.library.opcheck(
        support._forward,
        (hidden.requires_grad_(), weight.requires_grad_(), None, sampled, ids, None, None, 1.0, None, 1.0, -100, None, 0,
         None, "grad", None, 0, None, "auto", None),
    )  # fmt: skip


def test_a_long_hidden_row_and_odd_sizes():
    """H beyond what a block stages, H that no vector load fits, and a strided weight."""
    for device in DEVICES:
        for h in (37, 50001):
            g = torch.Generator().manual_seed(4)
            hidden, whole = torch.randn(5, h, generator=g).to(device), torch.randn(9, h + 3, generator=g).to(device)
            weight = whole[:, :h].requires_grad_()
            ids = torch.tensor([[0, 3, -1], [8, 8, 1], [2, -1, -1], [4, 5, 6], [-1, 7, 0]], dtype=torch.int32, device=device)
            sampled = torch.tensor([0, 1, 2, 8, 7], device=device)
            logprob, _ = lmhead.support_logprobs(hidden / h**0.5, weight, ids, sampled)
            exact = weight.detach().double().requires_grad_()
            want, _, _ = dense((hidden / h**0.5).double(), exact, ids, sampled)
            torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=4e-6)
            gradient, = torch.autograd.grad(logprob.sum(), weight)
            expected, = torch.autograd.grad(want.sum(), exact)
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=4e-6)
