"""lmhead.linear_logprobs on PyTorch tensors: values, gradients, and how autograd may use it."""

import threading

import lmhead
import pytest
import torch
from plain import largest, logprobs_and_entropy, relative
from torch.utils.checkpoint import checkpoint

N, H, V = 13, 32, 203
# Error of fp32 logits and sums at these sizes; gradients: one rounding of dl to the compute dtype and one of the result.
VALUE_TOL = 5e-6
GRADIENT_TOL = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float64: 1e-12}


def make(hidden=torch.float32, weight=torch.float32, leading=(N,), bias=False, seed=0, std=1.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, H, generator=g).to(hidden).requires_grad_()
    w = (std * torch.randn(V, H, generator=g) / H**0.5).to(weight).requires_grad_()
    t = torch.randint(0, V, leading, generator=g)
    b = torch.randn(V, generator=g).to(weight).requires_grad_() if bias else None
    return x, w, t, b


def gradients(outputs, inputs, seed=5):
    """Gradients of a random weighted sum of the outputs."""
    g = torch.Generator().manual_seed(seed)
    loss = sum((o.double() * torch.randn(o.shape, generator=g, dtype=torch.float64)).sum() for o in outputs)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(
    ("hidden", "weight"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("std", [1.0, 8.0])
def test_values_and_gradients(hidden, weight, softcap, std):
    x, w, t, b = make(hidden, weight, (3, 5), bias=True, std=std)
    temperature = torch.linspace(0.7, 1.4, 15).view(3, 5)
    options = dict(bias=b, temperature=temperature, softcap=softcap, logit_scale=0.8)
    got = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True, **options)
    want = logprobs_and_entropy(x, w, t, **options)
    for g, e in zip(got, want, strict=True):
        assert g.shape == t.shape and g.dtype == (torch.float64 if hidden == torch.float64 else torch.float32)
        assert largest(g, e) <= (1e-12 if hidden == torch.float64 else VALUE_TOL)
    assert (got[1] >= 0).all()
    tolerance = max(GRADIENT_TOL[hidden], GRADIENT_TOL[weight])
    for g, e, leaf in zip(gradients(got, (x, w, b)), gradients(want, (x, w, b)), (x, w, b), strict=True):
        assert g.dtype == leaf.dtype and g.shape == leaf.shape
        assert relative(g, e) <= tolerance


def test_gradcheck_in_fp64():
    g = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((4, 5), (11, 5), (11,)))
    t = torch.tensor([0, 10, -100, 30])

    def score(x, w, b):
        return lmhead.linear_logprobs(
            x, w, t, bias=b, softcap=3.0, temperature=1.3, logit_scale=0.7, valid_vocab=9, out_of_vocab="zero",
            return_entropy=True, entropy_requires_grad=True,
        )  # fmt: skip

    # The target outside the vocabulary has log-prob 0 and yet a gradient, by contract: only entropy of that row can be
    # compared with differences. Row 1's target is padding (>= valid_vocab), likewise.
    assert torch.autograd.gradcheck(lambda *a: (score(*a)[0][:1], score(*a)[1]), (x, w, b))


def test_metric_entropy_leaves_everything_else_alone():
    x, w, t, b = make(bias=True)
    off = lmhead.linear_logprobs(x, w, t, bias=b)
    logprob, entropy = lmhead.linear_logprobs(x, w, t, bias=b, return_entropy=True)
    assert not entropy.requires_grad and entropy.grad_fn is None
    assert torch.equal(logprob, off)
    for a, c in zip(gradients([logprob], (x, w, b)), gradients([off], (x, w, b)), strict=True):
        assert torch.equal(a, c)


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias", "hidden weight", "none"])
def test_gradients_nobody_wants_are_not_computed(needed, monkeypatch):
    from lmhead import _core

    x, w, t, b = make(bias=True)
    for name, tensor in (("hidden", x), ("weight", w), ("bias", b)):
        tensor.requires_grad_(name in needed)
    asked = []
    backward = _core.backward

    def spy(problem, inputs, outputs, execution):
        asked.append({n for n in ("hidden", "weight") if getattr(outputs, n).rows} | ({"bias"} if outputs.bias.size else set()))
        return backward(problem, inputs, outputs, execution)

    monkeypatch.setattr(_core, "backward", spy)
    logprob = lmhead.linear_logprobs(x, w, t, bias=b)
    if needed == "none":
        assert not logprob.requires_grad
        return
    logprob.sum().backward()
    assert asked == [set(needed.split())]
    for name, tensor in (("hidden", x), ("weight", w), ("bias", b)):
        assert (tensor.grad is not None) == (name in needed)


def test_retained_graph_gives_the_same_numbers_twice():
    x, w, t, _ = make()
    logprob, entropy = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    loss = (logprob + entropy).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("score", ["linear", "selected", "support"])
def test_results_may_be_changed_in_place(score):
    """As a trainer does that masks what it got."""
    x, w, t, _ = make(leading=(3, 5))
    if score == "linear":
        results = lmhead.linear_logprobs(x, w, t, return_entropy=True)[:1]
    elif score == "selected":
        results = lmhead.selected_logprobs(x, w, t, t[..., None])
    else:
        results = lmhead.support_logprobs(x, w, torch.stack([t, t // 2], -1).int(), t)[:1]
    mask = torch.arange(15).view(3, 5) % 2 > 0
    want = [torch.autograd.grad(2 * r[mask].sum(), (x, w), retain_graph=True) for r in results]
    for result in results:
        result.mul_(2)
        result[~mask] = 0
    got = [torch.autograd.grad(r.sum(), (x, w), retain_graph=True) for r in results]
    assert all(torch.equal(a, b) for g, s in zip(got, want, strict=True) for a, b in zip(g, s, strict=True))


@pytest.mark.parametrize("main_grad", [False, True])
def test_double_backward_says_that_there_is_none(main_grad):
    x, w, t, _ = make()
    main = torch.zeros(V, H) if main_grad else None
    (dx,) = torch.autograd.grad(lmhead.linear_logprobs(x, w, t, weight_main_grad=main).sum(), x, create_graph=True)
    assert torch.isfinite(dx).all()  # a first derivative that stays in a graph is fine
    with pytest.raises(NotImplementedError, match="got a second derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("operator", ["linear", "selected", "support"])
def test_forward_mode_is_an_error_instead_of_a_zero_tangent(operator, name):
    x, w, t, b = make(bias=True)
    tensors = {"hidden": x, "weight": w, "bias": b}
    ids = torch.stack([t, t // 2], -1).int()

    def score(value):
        hidden, weight, bias = (tensors | {name: value}).values()
        if operator == "linear":
            return lmhead.linear_logprobs(hidden, weight, t, bias=bias)
        if operator == "selected":
            return lmhead.selected_logprobs(hidden, weight, t, ids, bias=bias)
        return lmhead.support_logprobs(hidden, weight, ids, t.int(), bias=bias)

    value = tensors[name].detach()
    with pytest.raises(NotImplementedError, match=f"{name}: expected reverse-mode autograd .* got a tensor of forward-mode"):
        torch.func.jvp(score, (value,), (torch.ones_like(value),))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    x, w, t, _ = make()

    def score(x):
        return lmhead.linear_logprobs(x * 2, w, t, return_entropy=True, entropy_requires_grad=True)

    want = torch.autograd.grad(sum(o.sum() for o in score(x)), (x, w))
    sum(o.sum() for o in checkpoint(score, x, use_reentrant=reentrant)).backward()
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


def test_no_grad_inference_mode_and_inference_only():
    x, w, t, _ = make()
    want = lmhead.linear_logprobs(x, w, t)
    with torch.no_grad():
        # Entropy that would be differentiable is fine here: only inference_only contradicts it.
        got, _ = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    with torch.inference_mode():
        inferred = lmhead.linear_logprobs(x, w, t)
    only = lmhead.linear_logprobs(x, w, t, inference_only=True)
    for other in (got, inferred, only):
        assert torch.equal(other, want) and not other.requires_grad
    assert only.grad_fn is None and want.requires_grad


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
def test_autocast_rounds_the_weight_without_saving_a_copy(autocast, hidden):
    x, w, t, _ = make(hidden)
    with torch.autocast("cpu", dtype=autocast):
        logprob, entropy = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    saved = [s for s in logprob.grad_fn.saved_tensors if s is not None and s.dim() == 2 and s.shape[0] == V]
    assert [s.data_ptr() for s in saved] == [w.data_ptr()]
    want = logprobs_and_entropy(x, w, t, compute_dtype=autocast)
    assert logprob.dtype == torch.float32
    assert largest(logprob, want[0]) <= VALUE_TOL and largest(entropy, want[1]) <= VALUE_TOL
    dx, dw = gradients((logprob, entropy), (x, w))
    assert dx.dtype == hidden and dw.dtype == torch.float32
    for g, e in zip((dx, dw), gradients(want, (x, w)), strict=True):
        assert relative(g, e) <= GRADIENT_TOL[autocast] + GRADIENT_TOL[hidden]


def test_autocast_leaves_fp64_alone():
    x, w, t, _ = make(torch.float64, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lmhead.linear_logprobs(x, w, t), lmhead.linear_logprobs(x, w, t))


def strided(tensor, kind):
    """The same values in other strides."""
    if kind == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "every other row":
        return tensor.repeat_interleave(2, 0)[::2]
    if kind == "wide rows":
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]
    return tensor


@pytest.mark.parametrize("kind", ["transposed", "every other row", "wide rows"])
def test_strided_hidden(kind):
    x, w, t, _ = make(leading=(4, 6))
    want = lmhead.linear_logprobs(x, w, t)
    other = strided(x.detach(), kind).requires_grad_()
    got = lmhead.linear_logprobs(other, w, t)
    assert torch.equal(got, want)
    for a, b in zip(gradients([got], (other, w)), gradients([want], (x, w)), strict=True):
        assert torch.equal(a, b)
    sliced = lmhead.linear_logprobs(x[:, :-1], w, t[:, :-1])
    assert torch.equal(sliced, want[:, :-1])
    (dx,) = torch.autograd.grad(sliced.sum(), x)
    assert (dx[:, -1] == 0).all() and dx[:, :-1].abs().sum() > 0


def test_row_strided_inputs_are_read_where_they_are(monkeypatch):
    from lmhead import _tensors

    x, w, t, _ = make()
    x, w = strided(x.detach(), "wide rows"), strided(w.detach(), "wide rows")
    seen = {}
    monkeypatch.setattr(
        _tensors, "matrix", lambda name, m, real=_tensors.matrix: seen.update({name: m.data_ptr()}) or real(name, m)
    )
    lmhead.linear_logprobs(x, w, t)
    assert seen == {"hidden": x.data_ptr(), "weight": w.data_ptr()}


def test_upstream_gradients_of_any_stride():
    x, w, t, _ = make(leading=(4, 6))
    logprob, entropy = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    base = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(9))
    contiguous = [base[..., k].contiguous() for k in range(2)]
    want = torch.autograd.grad((logprob, entropy), (x, w), contiguous, retain_graph=True)
    for upstream in ([base[..., 0], base[..., 1]], [c.T.contiguous().T for c in contiguous]):
        got = torch.autograd.grad((logprob, entropy), (x, w), upstream, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    one = torch.autograd.grad(logprob, (x, w), torch.ones(()).expand(4, 6), retain_graph=True)
    same = torch.autograd.grad(logprob.sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))


def test_a_missing_upstream_gradient_counts_as_zero():
    x, w, t, _ = make()
    logprob, entropy = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    want = logprobs_and_entropy(x, w, t)
    for k, output in enumerate((logprob, entropy)):
        for g, e in zip(gradients([output], (x, w)) if k else torch.autograd.grad(output.sum(), (x, w), retain_graph=True),
                        gradients([want[k]], (x, w)) if k else torch.autograd.grad(want[k].sum(), (x, w), retain_graph=True),
                        strict=True):  # fmt: skip
            assert relative(g, e) <= GRADIENT_TOL[torch.float32]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 1, 3), (0, 3)])
def test_leading_dims_and_id_types(ids, leading):
    x, w, t, _ = make(leading=leading)
    wide = t.to(ids).unsqueeze(-1).repeat_interleave(2, -1)[..., 0]  # not contiguous
    logprob = lmhead.linear_logprobs(x, w, wide)
    assert logprob.shape == torch.Size(leading)
    assert largest(logprob, logprobs_and_entropy(x, w, t)[0]) <= VALUE_TOL
    logprob.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape
    if 0 in leading:
        assert (w.grad == 0).all()


def test_tied_embedding_adds_up_both_gradients():
    _, w, t, _ = make()
    tokens = torch.arange(N) * 3

    def loss(score):
        x = torch.nn.functional.embedding(tokens, w)
        return score(x, w, t)[0].sum()

    (got,) = torch.autograd.grad(loss(lambda *a: (lmhead.linear_logprobs(*a),)), w)
    (want,) = torch.autograd.grad(loss(logprobs_and_entropy), w)
    assert relative(got, want) <= GRADIENT_TOL[torch.float32]


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_weight_main_grad_is_added_to_in_place(weight):
    x, w, t, b = make(weight=weight, bias=True)
    main = torch.full((V, H), 0.5)
    want = torch.autograd.grad(logprobs_and_entropy(x, w, t, bias=b)[0].sum(), (x, w, b))
    logprob = lmhead.linear_logprobs(x, w, t, bias=b, weight_main_grad=main)
    logprob.sum().backward(retain_graph=True)
    assert w.grad is None
    assert relative(main - 0.5, want[1]) <= GRADIENT_TOL[weight]
    assert relative(x.grad, want[0]) <= GRADIENT_TOL[weight] and relative(b.grad, want[2]) <= GRADIENT_TOL[weight]
    logprob.sum().backward()
    assert relative((main - 0.5) / 2, want[1]) <= GRADIENT_TOL[weight]
    frozen = lmhead.linear_logprobs(x, w.detach(), t, bias=b, weight_main_grad=main)
    before = main.clone()
    frozen.sum().backward()
    assert torch.equal(main, before)


def test_main_grad_of_wide_rows():
    x, w, t, _ = make()
    wide = torch.zeros(V, 2 * H)
    lmhead.linear_logprobs(x, w, t, weight_main_grad=wide[:, :H]).sum().backward()
    (want,) = torch.autograd.grad(lmhead.linear_logprobs(x, w, t).sum(), w)
    assert relative(wide[:, :H], want) <= 1e-7 and (wide[:, H:] == 0).all()


def test_active_rows_have_the_bits_of_the_dense_call():
    x, w, t, _ = make()
    active = torch.arange(N) % 3 == 0
    dense = lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True)
    with torch.no_grad():
        x[1], t[1] = torch.nan, 10**9  # an inactive row may hold anything
    for mask in (active, active.to(torch.uint8), active.long() * 2 - 1, active.repeat_interleave(2)[::2]):
        got = lmhead.linear_logprobs(x, w, t, active=mask, return_entropy=True, entropy_requires_grad=True)
        for g, d in zip(got, dense, strict=True):
            assert torch.equal(g[active], d[active]) and (g[~active] == 0).all()
        dx, dw = torch.autograd.grad(got[0].sum() + got[1].sum(), (x, w))
        assert (dx[~active] == 0).all() and torch.isfinite(dw).all()
        want = logprobs_and_entropy(x[active], w, t[active])
        assert relative(dw, torch.autograd.grad(want[0].sum() + want[1].sum(), w)[0]) <= GRADIENT_TOL[torch.float32]


def test_ignored_and_out_of_vocabulary_targets():
    x, w, t, _ = make()
    t[0], t[1], t[2] = -100, V, -1
    got = lmhead.linear_logprobs(x, w, t, out_of_vocab="zero", return_entropy=True, entropy_requires_grad=True)
    want = logprobs_and_entropy(x, w, t, out_of_vocab="zero")
    assert (got[0][:3] == 0).all() and got[1][0] == 0
    for g, e in zip(got, want, strict=True):
        assert largest(g, e) <= VALUE_TOL
    for g, e in zip(gradients(got, (x, w)), gradients(want, (x, w)), strict=True):
        assert relative(g, e) <= GRADIENT_TOL[torch.float32]
    with pytest.raises(ValueError, match=r"targets: expected ids in \[0, 203\) or ignore_index -100, got 203 at row 1"):
        lmhead.linear_logprobs(x, w, t)
    # Unchecked, the bad rows are NaN and nothing else is touched.
    unchecked = lmhead.linear_logprobs(x, w, t, check=False)
    assert torch.isnan(unchecked[1:3]).all() and largest(unchecked[3:], want[0][3:]) <= VALUE_TOL


def test_temperature_tensors():
    x, w, t, _ = make()
    half = lmhead.linear_logprobs(x, w, t, temperature=0.5)
    for same in (torch.tensor(0.5), torch.full((N,), 0.5), torch.tensor([0.5]), torch.full((N,), 0.5).bfloat16()):
        assert torch.equal(lmhead.linear_logprobs(x, w, t, temperature=same), half)
    with pytest.raises(ValueError, match="temperature: expected finite numbers > 0, got 0 at row 3"):
        lmhead.linear_logprobs(x, w, t, temperature=torch.where(torch.arange(N) == 3, 0.0, 1.0))


def test_several_threads():
    x, w, t, _ = make()
    want = torch.autograd.grad(lmhead.linear_logprobs(x, w, t).sum(), (x, w))
    results = [None] * 4

    def work(k):
        for _ in range(5):
            results[k] = torch.autograd.grad(lmhead.linear_logprobs(x, w, t).sum(), (x, w))
            assert lmhead.last_backend() != ""

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, want, strict=True))


def test_the_gil_is_released():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 128, generator=g), torch.randn(4096, 128, generator=g)
    t = torch.zeros(64, dtype=torch.int64)
    done, ticks = threading.Event(), 0
    thread = threading.Thread(target=lambda: (lmhead.linear_logprobs(x, w, t, backend="reference"), done.set()))
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks >= 5  # the call takes some 100 ms; holding the GIL, it would end before the first tick


def test_inputs_are_never_written_to():
    x, w, t, b = make(bias=True)
    before = [v.detach().clone() for v in (x, w, t, b)]
    lp, e = lmhead.linear_logprobs(x, w, t, bias=b, return_entropy=True, entropy_requires_grad=True)
    (lp + e).sum().backward()
    assert all(torch.equal(a, c) for a, c in zip(before, (x, w, t, b), strict=True))


def test_module_form():
    linear = torch.nn.Linear(H, V)
    head = lmhead.LinearLogprobs.from_linear(linear, return_entropy=True, temperature=0.7)
    assert head.weight is linear.weight and "temperature=0.7" in repr(head)
    x, _, t, _ = make()
    logprob, entropy = head(x, t)
    want = logprobs_and_entropy(x, linear.weight, t, bias=linear.bias, temperature=0.7)
    assert largest(logprob, want[0]) <= VALUE_TOL and largest(entropy, want[1]) <= VALUE_TOL
    assert largest(head(x, t, temperature=1.0, return_entropy=False), logprobs_and_entropy(x, linear.weight, t, bias=linear.bias)[0]) <= VALUE_TOL
    own = lmhead.LinearLogprobs(H, V, bias=True, dtype=torch.bfloat16)
    own.load_state_dict(linear.state_dict())
    assert torch.equal(own.weight, linear.weight.bfloat16())
    tied = lmhead.LinearLogprobs.from_linear(torch.nn.Embedding(V, H))
    assert tied.bias is None and tied(x, t).shape == t.shape
    with pytest.raises(TypeError, match="tempreature: expected one of"):
        lmhead.LinearLogprobs(H, V, tempreature=1.0)
    with pytest.raises(ValueError, match="hidden_size: expected >= 1, got 0"):
        lmhead.LinearLogprobs(0, V)
    with pytest.raises(TypeError, match="vocab_size: expected an integer, got float"):
        lmhead.LinearLogprobs(H, 2.0)
    for module, got in ((torch.nn.ReLU(), "ReLU with weight NoneType"), (torch.nn.LayerNorm(H), rf"LayerNorm with weight \[{H}\]")):
        with pytest.raises(TypeError, match=rf"linear: expected a module with a weight \[V, H\].*, got {got}"):
            lmhead.LinearLogprobs.from_linear(module)


def test_a_cache_is_an_error_where_none_is_kept():
    x, w, t, _ = make()
    with pytest.raises(NotImplementedError, match="cache_bytes: expected 0 on backend (cpu|reference), .* got 4096"):
        lmhead.linear_logprobs(x, w, t, cache_bytes=4096)
    with torch.no_grad():  # no backward will come, so none is asked for
        assert torch.equal(lmhead.linear_logprobs(x, w, t, cache_bytes=4096), lmhead.linear_logprobs(x, w, t))
