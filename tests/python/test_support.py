"""Candidate sets: against a dense fp64 definition, its gradients, padding, empty sets, compile."""

from __future__ import annotations

import pytest
import torch

import lmhead

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()

N, H, V = 37, 64, 512


def problem(k=8, dtype=torch.float32, seed=0, device="cpu", std=3.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * std / H**0.5).to(dtype)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 8, 64, 1024])
def test_fp32_gradients_within_a_millionth_of_unit_logits(k, device):
    """Logits of unit variance, where an fp32 logit itself is good to 1e-6: gradients as tight as values."""
    hidden, weight, ids, sampled = problem(k, device=device, std=1.0)
    leaves, exact = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()], [
        t.double().requires_grad_() for t in (hidden, weight)
    ]
    a, e = torch.randn(2, N, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(device)
    got = lmhead.support_logprobs(*leaves, ids, sampled, temperature=0.7, entropy_requires_grad=True)
    want = dense(*exact, ids, sampled, temperature=0.7)
    for value, reference in zip(got, want):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-6)
    (got[0] * a + got[1] * e).sum().backward()
    (want[0] * a + want[1] * e).sum().backward()
    for leaf, reference in zip(leaves, exact):
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-5, atol=1e-6)


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
    ignored = sampled.clone()
    ignored[3] = -100  # outside the loss
    lmhead.support_logprobs(hidden, weight, ids, ignored, empty_support="error")
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    full, entropy = lmhead.support_logprobs(x, w, ids, sampled, empty_support="full", temperature=0.7)
    whole = torch.log_softmax((hidden.double() @ weight.double().T) / 0.7, -1)
    torch.testing.assert_close(full[3].double(), whole[3, sampled[3]], rtol=1e-5, atol=4e-6)
    assert entropy[3] == 0
    full[3].backward()
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)[3, sampled[3]].backward()
    for got, want in zip((x.grad, w.grad), (t.grad for t in exact)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=4e-6)
    # The other rows keep their sets, and a temperature a row is the row's own.
    temperatures = torch.linspace(0.5, 1.5, N)
    zero = lmhead.support_logprobs(hidden, weight, ids, sampled, temperature=temperatures)
    full, entropy = lmhead.support_logprobs(
        hidden, weight, ids, sampled, empty_support="full", temperature=temperatures
    )
    assert torch.equal(full[4:], zero[0][4:]) and torch.equal(entropy, zero[1])
    whole = torch.log_softmax(hidden[3].double() @ weight.double().T / temperatures[3], -1)
    torch.testing.assert_close(full[3].double(), whole[sampled[3]], rtol=1e-5, atol=4e-6)
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
    with pytest.raises(TypeError, match=r"hidden: expected torch\.Tensor, got ndarray"):
        lmhead.support_logprobs(hidden.cpu().numpy(), weight, ids, sampled)
    with pytest.raises(TypeError, match="support_ids: expected int32, got int64"):
        lmhead.support_logprobs(hidden, weight, ids.long(), sampled)
    with pytest.raises(ValueError, match=r"support_ids: expected \[37, K\].*got \[36, 8\]"):
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("h", [37, 8200, 50001])
def test_a_long_hidden_row_and_odd_sizes(h, device):
    """H that no vector load fits, H of more columns than a block sums at once, H beyond what a block stages; a strided weight."""
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(5, h, generator=g).div(h**0.5).to(device).requires_grad_()
    weight = torch.randn(9, h + 8, generator=g).to(device)[:, :h].requires_grad_()
    ids = torch.tensor([[0, 3, -1], [8, 8, 1], [2, -1, -1], [4, 5, 6], [-1, 7, 0]], dtype=torch.int32, device=device)
    sampled = torch.tensor([0, 1, 2, 8, 7], device=device)
    logprob, _ = lmhead.support_logprobs(hidden, weight, ids, sampled)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want, _, _ = dense(*exact, ids, sampled)
    torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=4e-6)
    for got, expected in zip(torch.autograd.grad(logprob.sum(), (hidden, weight)), torch.autograd.grad(want.sum(), exact)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("h", [37, 64, 1100 * 8])
def test_ids_that_many_rows_list(h, device):
    """The weight gradient of ids in every row, in half of the rows and in one, and no row of it from padding."""
    n, k = 1500, 4
    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(n, h, generator=g), torch.randn(40, h, generator=g) / h**0.5
    ids = torch.randint(9, 30, (n, k), generator=g, dtype=torch.int32)
    ids[:, 1] = 7
    ids[::2, 2] = 31
    ids[::3, 3] = -1
    ids[100, 3] = 39
    hidden, weight, ids = hidden.to(device), weight.to(device), ids.to(device)
    sampled, upstream = ids[:, 0].long(), torch.randn(2, n, generator=g).to(device)
    bias = torch.zeros(40, device=device)

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logprob, entropy = lmhead.support_logprobs(
            leaves[0], leaves[1], ids, sampled, bias=leaves[2], entropy_requires_grad=True
        )
        return torch.autograd.grad((logprob * upstream[0] + entropy * upstream[1]).sum(), leaves)

    got, exact = gradients(), [t.double().requires_grad_() for t in (hidden, weight, bias)]
    logprob, entropy, _ = dense(exact[0], exact[1], ids, sampled, bias=exact[2])
    want = torch.autograd.grad((logprob * upstream[0] + entropy * upstream[1]).sum(), exact)
    for g, w in zip(got, want):
        error, size = (t.reshape(t.shape[0], -1).norm(dim=1) for t in (g.double() - w, w))  # of each row
        assert (error <= 4e-6 * size + 1e-6).all(), (error / size).max()
    assert (got[1][:7] == 0).all() and (got[1][32:39] == 0).all() and (got[1][39] != 0).any()
    for g, again in zip(got, gradients()):
        assert torch.equal(g, again)


@pytest.mark.parametrize("device", DEVICES)
def test_all_padding_and_no_rows(device):
    hidden, weight, ids, sampled = problem(device=device)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    for rows, k in ((N, 8), (0, 8), (N, 0)):
        logprob, entropy = lmhead.support_logprobs(
            x[:rows], w, torch.full_like(ids[:rows, :k], -1), sampled[:rows], entropy_requires_grad=True
        )
        assert logprob.shape == (rows,) and (logprob == 0).all() and (entropy == 0).all()
        for gradient in torch.autograd.grad((logprob + entropy).sum(), (x, w)):
            assert (gradient == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_unchecked_bad_id_is_nan_in_its_own_row(device):
    hidden, weight, ids, sampled = problem(device=device)
    want, want_entropy = lmhead.support_logprobs(hidden, weight, ids, sampled)
    ids[2, 1], ids[6, 0], sampled[9] = 2**30, -2, V
    x = hidden.clone().requires_grad_()
    logprob, entropy = lmhead.support_logprobs(x, weight, ids, sampled, check=False)
    good = torch.ones(N, dtype=torch.bool, device=device)
    good[[2, 6, 9]] = False
    assert torch.isnan(logprob[~good]).all() and torch.equal(logprob[good], want[good])
    assert torch.equal(entropy[good], want_entropy[good])
    logprob.sum().backward()
    assert torch.isfinite(x.grad[good]).all() and torch.isnan(x.grad[[2, 6]]).any(1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cuts", [[0, 64, 128, 256, 512], [0, 7, 7, 300, 512]], ids=str)
def test_shards_of_the_vocabulary_join_to_the_whole(cuts, device):
    """Each shard's partial state and gradients, without a process group; dX is the sum of the shards' parts."""
    from lmhead import _core, _tensors, support

    hidden, weight, ids, sampled = problem(16, device=device)
    a, e = torch.randn(2, N, generator=torch.Generator().manual_seed(6)).to(device)
    options = dict(
        temperature=0.7, softcap=None, logit_scale=1.0, ignore_index=-100, valid_vocab=None, vocab_start=0, vocab_size=V,
        entropy="grad", compute_dtype=None, workspace_bytes=0, check=False, backend="auto", group=None,
    )  # fmt: skip

    def call(begin, end):
        return support._SupportCall(
            hidden, weight[begin:end], None, sampled, ids, None, None, {**options, "vocab_start": begin}
        )

    shards = list(zip(cuts, cuts[1:]))
    states = torch.full((len(shards) * N, _tensors.STATE_WIDTH), torch.nan, device=device)
    for s, (begin, end) in enumerate(shards):
        c = call(begin, end)
        c.reserve(_core.Operation.forward_partial)
        state = states[s * N : (s + 1) * N]
        _core.support_forward_partial(c.support, _tensors.output_matrix(state), c.execution)
    c, outputs = call(0, cuts[1]), _core.SupportOutputs()
    logprob, entropy, lse = (torch.empty(N, device=device) for _ in range(3))
    outputs.logprob, outputs.entropy, outputs.lse = map(_tensors.output_vector, (logprob, entropy, lse))
    _core.support_combine(c.support, _tensors.matrix("states", states), outputs, c.execution)

    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    want = lmhead.support_logprobs(x, w, ids, sampled, temperature=0.7, entropy_requires_grad=True)
    for got, whole in zip((logprob, entropy), want):
        torch.testing.assert_close(got, whole.detach(), rtol=1e-5, atol=4e-6)
    want_dx, want_dw = torch.autograd.grad((want[0] * a + want[1] * e).sum(), (x, w))
    total = torch.ones(N, H, device=device)  # accumulated into what is there
    for begin, end in shards:
        c, gradients, inputs = call(begin, end), _core.BackwardOutputs(), _core.BackwardInputs()
        for name, tensor in (("lse", lse), ("entropy", entropy), ("dlogprob", a), ("dentropy", e)):
            setattr(inputs, name, _tensors.vector(name, tensor))
        dw = torch.full((end - begin, H), 2.0, device=device)
        gradients.hidden, gradients.weight = _tensors.output_matrix(total), _tensors.output_matrix(dw)
        gradients.accumulate_hidden = gradients.accumulate_weight = True
        c.reserve(_core.Operation.backward, gradients)
        _core.support_backward(c.support, inputs, gradients, c.execution)
        torch.testing.assert_close(dw - 2, want_dw[begin:end], rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(total - 1, want_dx, rtol=1e-5, atol=4e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("selected", [False, True], ids=["support", "selected"])
def test_nothing_waits_for_the_gpu(selected):
    hidden, weight, ids, sampled = problem(device="cuda")
    ids = ids.clamp_min(0) if selected else ids
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if selected:
            logprob, more, entropy = lmhead.selected_logprobs(
                x, w, sampled, ids, return_entropy=True, entropy_requires_grad=True
            )
            loss = logprob.sum() + more.sum() + entropy.sum()
        else:
            logprob, entropy = lmhead.support_logprobs(x, w, ids, sampled, entropy_requires_grad=True)
            loss = logprob.sum() + entropy.sum()
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.abs().sum() > 0
