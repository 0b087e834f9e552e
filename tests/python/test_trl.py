"""TRL's fused head with lmhead below it, against TRL itself."""

import hosts
import pytest
import torch
from lmhead.adapters import trl as adapter
from plain import largest, logprobs_and_entropy, relative


@pytest.fixture(scope="module")
def trl():
    return hosts.trl()


def make(n=19, h=48, v=331, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, h, generator=g).to(dtype).requires_grad_()
    w = (2 * torch.randn(v, h, generator=g) / h**0.5).to(dtype).requires_grad_()
    b = torch.randn(v, generator=g).to(dtype).requires_grad_() if bias else None
    return x, w, b, torch.randint(0, v, (n,), generator=g)


def scored(function, x, w, b, t, *options, outputs):
    results = function(x, w, b, t, *options, outputs=outputs)
    weights = torch.linspace(-1, 1, len(t))
    loss = (results[0] * weights).sum()
    if results[1] is not None:
        loss = loss + (results[1] * weights.flip(0)).sum()
    return results, torch.autograd.grad(loss, [v for v in (x, w, b) if v is not None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 0.5)])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy")])
def test_against_the_hosts_function_in_fp32(trl, bias, softcap, scale, outputs):
    data = make(bias=bias)
    options = (0.8, 64, softcap, scale)
    want, want_grads = scored(trl[0].ChunkedLogProbFunction.apply, *data, *options, outputs=outputs)
    got, got_grads = scored(adapter.ChunkedLogProbFunction.apply, *data, *options, outputs=outputs)
    for g, e in zip(got, want, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            assert g.dtype == e.dtype and g.requires_grad == e.requires_grad and largest(g, e) <= 1e-5
    for g, e in zip(got_grads, want_grads, strict=True):
        assert g.dtype == e.dtype and relative(g, e) <= 1e-5


def test_optional_outputs(trl):
    x, w, b, t = make()
    with torch.no_grad():  # some rows predict their target
        t[::3] = (x @ w.T + b).argmax(-1)[::3]
    outputs = adapter.OPTIONAL_OUTPUTS
    want = trl[0].ChunkedLogProbFunction.apply(x, w, b, t, 0.8, 64, None, 1.0, outputs)
    got = adapter.ChunkedLogProbFunction.apply(x, w, b, t, 0.8, 64, None, 1.0, outputs)
    for g, e in zip(got[:4], want[:4], strict=True):
        assert g.requires_grad == e.requires_grad and largest(g, e) <= 2e-5
    assert torch.equal(got[4], want[4]) and 0 < int(got[4].sum()) < len(t)


def test_bf16_is_closer_to_fp64_than_the_host(trl):
    x, w, b, t = make(n=64, h=128, v=2048, dtype=torch.bfloat16, bias=False)
    exact = logprobs_and_entropy(x, w, t)
    want, _ = scored(trl[0].ChunkedLogProbFunction.apply, x, w, b, t, 1.0, 512, None, 1.0, outputs=("entropy",))
    got, grads = scored(adapter.ChunkedLogProbFunction.apply, x, w, b, t, 1.0, 512, None, 1.0, outputs=("entropy",))
    for g, e, host in zip(got[:2], exact, want[:2], strict=True):
        assert largest(g, e) <= 1e-5 < largest(host, e)  # the host rounds its logits to bf16
    weights = torch.linspace(-1, 1, 64, dtype=torch.float64)
    for g, e in zip(grads, torch.autograd.grad((exact[0] * weights).sum() + (exact[1] * weights.flip(0)).sum(), (x, w)), strict=True):
        assert relative(g, e) <= 6e-3


def test_autocast_and_fp32_heads_run_in_the_hosts_types(trl):
    x, w, _, t = make(bias=False)
    for weight, hidden, autocast in ((w, x, True), (w.detach().bfloat16().requires_grad_(), x, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            want = trl[0].ChunkedLogProbFunction.apply(hidden, weight, None, t, 1.0, 64, None, 1.0, ())[0]
            got = adapter.chunked_logprob(hidden, weight, None, t, 1.0, 64, None, 1.0, ())[0]
        exact = logprobs_and_entropy(hidden, weight, t, compute_dtype=torch.bfloat16 if autocast else torch.float32)[0]
        assert largest(got, exact) <= 1e-5
        assert largest(want, exact) <= (0.1 if autocast else 1e-5)


def test_softcap_has_no_mean_logits():
    x, w, b, t = make()
    with pytest.raises(NotImplementedError, match="mean_logits"):
        adapter.chunked_logprob(x, w, b, t, 1.0, 64, 5.0, 1.0, ("mean_logits",))


def test_zero3_parameters_are_refused():
    x, w, b, t = make()
    w.ds_id = 3
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        adapter.chunked_logprob(x, w, b, t, 1.0)


def test_installed_below_add_fused_lm_head(trl, monkeypatch):
    """TRL's own patched model forward gives the same output and gradients with lmhead under it."""
    transformers = pytest.importorskip("transformers")
    kernels, utils = trl
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(0, 131, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100

    def run():
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss + 0.1 * out.entropy.mean()).backward()
        return out, {name: p.grad.clone() for name, p in model.named_parameters()}

    want, want_grads = run()
    monkeypatch.setattr(kernels, "ChunkedLogProbFunction", kernels.ChunkedLogProbFunction)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    assert adapter.install() == ["trl.kernels.ChunkedLogProbFunction", "trl.trainer.utils._ChunkedLogProbFunction"]
    got, got_grads = run()
    assert largest(got.loss, want.loss) <= 1e-5
    assert largest(got.log_probs, want.log_probs) <= 1e-5 and largest(got.entropy, want.entropy) <= 1e-5
    assert torch.equal(got.is_top1, want.is_top1)
    assert all(relative(got_grads[name], grad) <= 1e-4 for name, grad in want_grads.items())
