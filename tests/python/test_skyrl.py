"""SkyRL's fused scoring functions, against SkyRL's own on a CPU."""

import inspect
import sys
import types

import hosts
import pytest
import torch
from lmhead.adapters import skyrl as adapter
from plain import largest, logprobs_and_entropy, relative

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def skyrl():
    return hosts.skyrl()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with hosts.one_rank_group(tmp_path_factory.mktemp("store"), "gloo") as group:
        yield group


def make(b=4, s=32, v=4096, h=256, hidden=FP32, weight=FP32, beyond=1024, seed=0):
    """Ids run up to v + beyond: about a fifth of them is out of vocabulary."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, s, h, generator=g).to(hidden).requires_grad_()
    w = (torch.randn(v, h, generator=g) / h**0.5).to(weight).requires_grad_()
    return x, w, torch.randint(0, v + beyond, (b, s), generator=g)


def exact(x, w, target, temperature=1.0):
    """(logprob, entropy) [B, S - 1] in fp64 under SkyRL's rules."""
    return logprobs_and_entropy(
        x[:, :-1], w, target[:, 1:], temperature=temperature, out_of_vocab="zero", ignore_index=-(2**62)
    )


def upstream(shape):
    return torch.linspace(-1, 1, shape.numel()).view(shape)


def grads(output, *leaves):
    return torch.autograd.grad((output * upstream(output.shape).to(output.dtype)).sum(), leaves)


def section2_bound(x, w, target):
    """4 x the error of (vendor GEMM with fp32 output, fp64 softmax) + 1e-6 + 2^-22 max(|m|, |z_y|, |value|)."""
    hidden, ids = x[:, :-1].detach().to(w.dtype).float(), target[:, 1:]
    logits = (hidden @ w.detach().float().T).double()
    known = ids < w.shape[0]
    picked = logits.gather(-1, ids.where(known, 0)[..., None])[..., 0]
    floor = torch.where(known, picked - torch.logsumexp(logits, -1), 0.0)
    value = exact(x.detach(), w.detach(), target)[0]
    largest_term = torch.maximum(torch.maximum(logits.amax(-1).abs(), picked.abs()), value.abs())
    return 4 * (floor - value).abs() + 1e-6 + 2**-22 * largest_term


@pytest.mark.parametrize(("hidden", "weight"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_log_probs_and_gradients(skyrl, group, hidden, weight, record_property):
    x, w, target = make(hidden=hidden, weight=weight)
    arguments = (x, w, target, 0, w.shape[0], group)
    want = skyrl.from_parallel_hidden_to_logprobs(*arguments)
    got = adapter.from_parallel_hidden_to_logprobs(*arguments)
    truth = exact(x, w, target)[0]
    assert got.shape == want.shape == (4, 31) and got.dtype == want.dtype == FP32
    out = target[:, 1:] >= 4096
    assert 0 < int(out.sum()) and (got[out] == 0).all() and (want[out] == 0).all()
    record_property("host_logprob_error", largest(want, truth))
    if weight is FP32:
        assert largest(got, want) <= 1e-5 and largest(got, truth) <= 1e-5
    else:
        assert largest(want, truth) > 1e-3  # the host's logits are rounded to bf16
        assert ((got.double() - truth).abs() <= section2_bound(x, w, target)).all()
    dx, dw = grads(got, x, w)
    for host_dx, host_dw in (grads(want, x, w), grads(truth, x, w)):
        assert dx.dtype == hidden and largest(dx, host_dx) <= 2e-3
        assert dw.dtype == weight and largest(dw, host_dw) <= (2e-3 if weight is FP32 else 4e-2)
    assert (dx[:, -1] == 0).all()


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_host_chunk_sizes_change_nothing_here(skyrl, group, chunk):
    x, w, target = make(b=2, s=16, v=512, h=64, beyond=128)
    arguments = (x, w, target, 0, 512, group, False, None, chunk)
    want = skyrl.from_parallel_hidden_to_logprobs(*arguments)
    got = adapter.from_parallel_hidden_to_logprobs(*arguments)
    assert largest(got, want) <= 1e-5
    assert torch.equal(got, adapter.from_parallel_hidden_to_logprobs(*arguments[:8]))
    for a, b in zip(grads(got, x, w), grads(want, x, w), strict=True):
        assert largest(a, b) <= 2e-3


@pytest.mark.parametrize("inference_only", [False, True])
def test_one_position_scores_nothing(skyrl, group, inference_only):
    x, w, target = make(s=1, v=512)
    arguments = (x, w, target, 0, 512, group, inference_only)
    for function in (skyrl.from_parallel_hidden_to_logprobs, adapter.from_parallel_hidden_to_logprobs):
        assert function(*arguments).shape == (4, 0)


@pytest.mark.parametrize("ids", ["all inside", "all outside", "negative", "every second outside"])
@pytest.mark.parametrize("v", [8, 512])
def test_ids_outside_the_vocabulary(skyrl, group, ids, v):
    x, w, target = make(b=2, s=12, v=v, h=64)
    target %= v
    if ids == "all outside":
        target += v
    elif ids == "negative":
        target[:] = -100
    elif ids == "every second outside":
        target[:, ::2] += v
    arguments = (x, w, target, 0, v, group)
    want = skyrl.from_parallel_hidden_to_logprobs(*arguments)
    got = adapter.from_parallel_hidden_to_logprobs(*arguments)
    assert largest(got, want) <= 1e-5
    for a, b in zip(grads(got, x, w), grads(want, x, w), strict=True):
        assert largest(a, b) <= 1e-5


@pytest.mark.parametrize("weight", [FP32, BF16])
def test_temperature_divides_finished_logits(skyrl, group, weight):
    x, w, target = make(b=2, s=12, v=512, h=64, weight=weight, hidden=weight)
    arguments = dict(temperature=0.7)
    got = adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 512, group, **arguments)
    want = skyrl.from_parallel_hidden_to_logprobs(x, w, target, 0, 512, group, **arguments)
    truth = exact(x, w, target, 0.7)[0]
    assert largest(got, truth) <= 1e-5
    assert largest(want, truth) <= (1e-5 if weight is FP32 else 0.1)  # the host rounds weight / T to bf16
    for a, b in zip(grads(got, x, w), grads(truth, x, w), strict=True):
        assert relative(a, b) <= (1e-5 if weight is FP32 else 6e-3)


def host_entropy(skyrl, x, w, temperature=1.0):
    """The host's differentiable entropy: of logits in memory."""
    logits = torch.nn.functional.linear(x[:, :-1].to(w.dtype), w).float() / temperature
    return skyrl.vocab_parallel_entropy(logits)


@pytest.mark.parametrize("weight", [FP32, BF16])
@pytest.mark.parametrize(("b", "s", "v", "h"), [(2, 31, 4096, 256), (3, 24, 256, 128)])
def test_differentiable_entropy(skyrl, group, weight, b, s, v, h):
    x, w, target = make(b, s, v, h, hidden=BF16 if weight is BF16 else FP32, weight=weight)
    logprob, entropy = adapter.from_parallel_hidden_to_logprobs(
        x, w, target, 0, v, group, return_entropy=True, entropy_requires_grad=True
    )
    truth, want = exact(x, w, target)[1], host_entropy(skyrl, x, w)
    assert torch.equal(logprob, adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, v, group))
    assert entropy.requires_grad and largest(entropy, truth) <= 1e-4
    assert largest(entropy, want) <= (1e-4 if weight is FP32 else 2e-2)
    dx, dw = grads(entropy, x, w)
    for host_dx, host_dw in (grads(want, x, w), grads(truth, x, w)):
        assert largest(dx, host_dx) <= 2e-3 and largest(dw, host_dw) <= 4e-2


def test_log_prob_and_entropy_in_one_backward(skyrl, group):
    x, w, target = make(1, 257, 2048, 128, beyond=0)
    logprob, entropy = adapter.from_parallel_hidden_to_logprobs(
        x, w, target, 0, 2048, group, return_entropy=True, entropy_requires_grad=True
    )
    host_logprob = skyrl.from_parallel_hidden_to_logprobs(x, w, target, 0, 2048, group)
    want = host_entropy(skyrl, x, w)
    assert largest(entropy, want) <= 2e-3 and largest(logprob, host_logprob) <= 2e-3
    got_grads = torch.autograd.grad((logprob + 0.1 * entropy).sum(), (x, w))
    want_grads = torch.autograd.grad((host_logprob + 0.1 * want).sum(), (x, w))
    for a, b in zip(got_grads, want_grads, strict=True):
        assert largest(a, b) <= 3e-3


def test_metric_entropy_changes_no_bit(skyrl, group):
    x, w, target = make(1, 257, 2048, 128, hidden=BF16, weight=BF16)
    off = adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 2048, group)
    logprob, entropy = adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 2048, group, return_entropy=True)
    assert torch.equal(logprob, off) and not entropy.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(grads(logprob, x, w), grads(off, x, w), strict=True))
    metric = adapter.fused_vocab_parallel_entropy_from_hidden(x[:, :-1], w, group)
    want = skyrl._fused_vocab_parallel_entropy_from_hidden(x[:, :-1].detach(), w.detach(), group)
    assert torch.equal(metric, entropy) and not metric.requires_grad
    assert largest(metric, want) <= 2e-2


PACKED = {
    "cu_seqlens only": (None, None),
    "right padding": ([[1] * 7 + [0], [1] * 5 + [0] * 3, [1] * 8], None),
    "left padding": ([[0] + [1] * 7, [0] * 3 + [1] * 5, [1] * 8], None),
    "sub-sequences": (None, [[7], [5, 8]]),
}


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_sequences(skyrl, group, case, temperature):
    mask, sub = PACKED[case]
    v, h, cu = 256, 64, torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    x, w, target = make(1, 24, v, h, beyond=32)
    arguments = (x, w, target, cu, 8 if sub is None else 16, 0, v, group, False, None, None)
    arguments += (None if mask is None else torch.tensor(mask), sub, temperature)
    want = skyrl.from_parallel_hidden_to_logprobs_packed_sequences(*arguments)
    got, entropy = adapter.from_parallel_hidden_to_logprobs_packed_sequences(
        *arguments, return_entropy=True, entropy_requires_grad=True
    )
    assert got.shape == want.shape == entropy.shape and got.abs().sum() > 0
    assert largest(got, want) <= 1e-5 and torch.equal(got == 0, want == 0)
    assert (entropy[want != 0] > 0).all()
    for a, b in zip(grads(got, x, w), grads(want, x, w), strict=True):
        assert largest(a, b) <= 1e-5
    assert torch.equal(got, adapter.from_parallel_hidden_to_logprobs_packed_sequences(*arguments))
    # Entropy stands where its log-prob stands: find the packed position of each log-prob by its value.
    truth_logprob, truth_entropy = (t[0] for t in exact(x.detach(), w.detach(), target, temperature))
    for value, its_entropy in zip(want[want != 0], entropy[want != 0], strict=True):
        position = (truth_logprob - value.detach()).abs().argmin()
        assert largest(truth_logprob[position], value) <= 1e-5 and largest(truth_entropy[position], its_entropy) <= 1e-5


def test_packed_entropy_metric_goes_through_the_hosts_own_function(skyrl, group, monkeypatch):
    v, h, cu = 256, 64, torch.tensor([0, 8, 16])
    x, w, _ = make(1, 16, v, h)
    mask, loss_mask = torch.ones(2, 8), torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    arguments = (x.detach(), w.detach(), cu, 8, 5, mask, loss_mask, None, group)
    want = skyrl.from_parallel_hidden_to_entropy_packed_sequences(*arguments)
    for name in ("_fused_vocab_parallel_entropy_from_hidden", "from_parallel_hidden_to_logprobs",
                 "from_parallel_hidden_to_logprobs_packed_sequences"):  # fmt: skip
        monkeypatch.setattr(skyrl, name, getattr(skyrl, name))
    replaced = adapter.install()
    assert f"{skyrl.__name__}.from_parallel_hidden_to_logprobs" in replaced and len(replaced) >= 3
    assert skyrl.from_parallel_hidden_to_logprobs is adapter.from_parallel_hidden_to_logprobs
    got = skyrl.from_parallel_hidden_to_entropy_packed_sequences(*arguments)
    assert all(largest(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
    # One masked mean of the one-pass entropy is that metric.
    packed_target = torch.zeros(1, 16, dtype=torch.int64)
    _, entropy = adapter.from_parallel_hidden_to_logprobs_packed_sequences(
        x, w, packed_target, cu, 8, 0, v, group, attention_mask=mask, return_entropy=True
    )
    assert largest(adapter.action_entropy(entropy, 5, loss_mask), want[0]) <= 1e-5


def test_signatures_are_the_hosts_with_three_keywords_at_the_end(skyrl):
    for name in ("from_parallel_hidden_to_logprobs", "from_parallel_hidden_to_logprobs_packed_sequences"):
        host, ours = (list(inspect.signature(getattr(m, name)).parameters.values()) for m in (skyrl, adapter))
        assert [(p.name, p.default, p.kind) for p in ours[:-3]] == [(p.name, p.default, p.kind) for p in host]
        added = [("return_entropy", False), ("entropy_requires_grad", False), ("loss_mask", None)]
        assert [(p.name, p.default) for p in ours[-3:]] == added


def test_loss_mask_fills_the_last_predictions(group):
    x, w, target = make(b=2, s=9, v=64, h=16, beyond=0)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 1]])
    options = {"return_entropy": True, "entropy_requires_grad": True}
    whole = adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 64, group, **options)
    got = adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 64, group, **options, loss_mask=mask)
    wanted = torch.zeros(2, 8, dtype=torch.bool)
    wanted[:, 3:] = mask > 0
    assert torch.equal(adapter.prediction_mask(mask.bool(), 2, 9), wanted)
    for g, dense in zip(got, whole, strict=True):
        assert torch.equal(g, dense.where(wanted, 0.0)) and (g != 0).sum() == wanted.sum()
    dx, dw = grads(got[0] + got[1], x, w)
    for g, dense in zip((dx, dw), grads((whole[0] + whole[1]) * wanted, x, w), strict=True):
        assert relative(g, dense) <= 1e-6
    assert (dx[:, :3] == 0).all()
    # The same through packed rows: two sequences of nine, padded to ten.
    padded = torch.nn.functional.pad(x.detach(), (0, 0, 0, 1), value=float("nan")).reshape(1, 20, 16)
    arguments = (padded, w, torch.nn.functional.pad(target, (0, 1)).reshape(1, 20), torch.tensor([0, 10, 20]), 9)
    arguments += (0, 64, group, False, None, None, torch.ones(2, 9))
    packed = adapter.from_parallel_hidden_to_logprobs_packed_sequences(*arguments, **options, loss_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(packed, got, strict=True))


def test_loss_mask_errors(group):
    x, w, target = make(b=2, s=5, v=64, h=16, beyond=0)
    for mask, error, message in (
        (torch.ones(2, 5, dtype=torch.bool), ValueError, r"loss_mask: expected num_actions <= 4 \(S - 1\), got 5"),
        (torch.ones(3, 2, dtype=torch.bool), ValueError, r"loss_mask: expected \[2, num_actions\], got \[3, 2\]"),
        (torch.ones(4, dtype=torch.bool), ValueError, r"loss_mask: expected \[2, num_actions\], got \[4\]"),
        (torch.ones(2, 3), TypeError, "loss_mask: expected bool or an integer type, got torch.float32"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), ValueError, "expected a tensor on cpu like target, got meta"),
    ):
        with pytest.raises(error, match=message):
            adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 64, group, loss_mask=mask)
        with pytest.raises(error, match=message):
            adapter.from_parallel_hidden_to_logprobs_packed_sequences(
                x.reshape(1, 10, 16), w, target.reshape(1, 10), torch.tensor([0, 5, 10]), 5, 0, 64, group, loss_mask=mask
            )
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="loss_mask: expected none for cross_entropy with per-token outputs"):
        adapter.prediction_mask(mask, 2, 5, loss_name="cross_entropy", per_token_outputs=True)
    for loss, outputs in (("cross_entropy", False), ("ppo", True), (None, True)):
        assert adapter.prediction_mask(mask, 2, 5, loss_name=loss, per_token_outputs=outputs).sum() == 6


def test_contradictions_and_wrong_shards(group):
    x, w, target = make(v=512)
    with pytest.raises(ValueError, match="entropy_requires_grad: expected return_entropy=True"):
        adapter.from_parallel_hidden_to_logprobs(x, w, target, 0, 512, group, entropy_requires_grad=True)
    with pytest.raises(ValueError, match="entropy_requires_grad: expected inference_only=False"):
        adapter.from_parallel_hidden_to_logprobs(
            x, w, target, 0, 512, group, True, return_entropy=True, entropy_requires_grad=True
        )
    with pytest.raises(ValueError, match=r"vocab_end_index: expected \(0, 512\)"):
        adapter.from_parallel_hidden_to_logprobs(x, w, target, 512, 1024, group)
    with pytest.raises(ValueError, match="sub_seq_lengths: expected 2 sub-sequences"):
        adapter.from_parallel_hidden_to_logprobs_packed_sequences(
            x[:1], w, target[:1], torch.tensor([0, 8, 32]), 8, 0, 512, group, sub_seq_lengths=[[3]]
        )


@pytest.mark.parametrize("loss", ["ppo", "gspo", None, "cross_entropy"])
@pytest.mark.parametrize("use_entropy_loss", [False, True])
def test_entropy_for_every_rl_loss_and_never_for_cross_entropy(loss, use_entropy_loss):
    options = adapter.entropy_options(loss, use_entropy_loss)
    assert options["return_entropy"] == (loss != "cross_entropy")
    assert options["entropy_requires_grad"] == (use_entropy_loss and loss != "cross_entropy")


def test_masked_mean_over_the_actions():
    entropy = torch.arange(12.0).view(2, 6).requires_grad_()
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    mean = adapter.action_entropy(entropy, 2, mask)
    assert largest(mean, torch.tensor((4 + 10 + 11) / 3)) <= 1e-6
    mean.backward()
    assert (entropy.grad[:, :4] == 0).all() and entropy.grad[0, 5] == 0
    assert float(adapter.action_entropy(entropy.detach(), 2, mask * 0)) == 0
    assert float(adapter.action_entropy(entropy.detach(), 2, None)) == 7.5


def _model(*, cls="GPTModel", base=(), processor=True, **config):
    defaults = {"mxfp8": False, "use_mup": False, "mtp_num_layers": None, "fine_grained_activation_offloading": False}

    def with_processor(self, output_processor=None, output_processor_context=None):
        return "ran"

    def without(self):
        return "ran"

    forward = with_processor if processor else without
    body = {"config": types.SimpleNamespace(**(defaults | config)), "post_process": False}
    return type(cls, base, body | {"forward": forward, "__call__": forward})()


@pytest.mark.parametrize(
    ("config", "supported"),
    [
        ({}, True),
        ({"mxfp8": True}, False),
        ({"use_mup": True}, False),
        ({"processor": False, "cls": "MambaModel"}, False),
        ({"processor": False, "hybrid": True}, True),
        ({"processor": False, "hybrid": True, "mtp_num_layers": 1}, False),
        ({"hybrid": True, "mxfp8": True}, False),
    ],
)
def test_heads_that_cannot_be_reproduced(config, supported):
    """The same models pass and fail as in the host's own check."""
    host = hosts.skyrl_fused_lm_head()
    hybrid = sys.modules["megatron.core.models.hybrid.hybrid_model"].HybridModel
    config = dict(config)
    base = (hybrid,) if config.pop("hybrid", False) else ()
    model = _model(base=base, **config)
    checks = (
        lambda: adapter.check_head(model),
        lambda: host.call_model_with_fused_lm_head(model, output_processor=None, output_processor_context={}),
    )
    for check in checks:
        if supported:
            check()
        else:
            with pytest.raises(NotImplementedError):
                check()
