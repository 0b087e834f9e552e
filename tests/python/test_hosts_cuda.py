"""The adapters on a GPU, against the hosts' own GPU kernels: values and gradients. Skips without one."""

import importlib

import hosts
import pytest
import torch
from lmhead.adapters import skyrl as skyrl_adapter
from lmhead.adapters import trl as trl_adapter
from lmhead.adapters import verl as verl_adapter
from plain import largest, logprobs_and_entropy, relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def skyrl():
    """skyrl's model_utils, and its Triton operators."""
    model_utils = hosts.skyrl()
    return model_utils, importlib.import_module(f"{model_utils.__package__}.fused_linear_logprob_triton")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with hosts.one_rank_group(tmp_path_factory.mktemp("store"), "cpu:gloo,cuda:nccl") as group:
        yield group


def make(b=4, s=32, v=4096, h=256, hidden=BF16, weight=BF16, beyond=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, s, h, generator=g).to("cuda", hidden).requires_grad_()
    w = (torch.randn(v, h, generator=g) / h**0.5).to("cuda", weight).requires_grad_()
    return x, w, torch.randint(0, v + beyond, (b, s), generator=g).cuda()


def upstream(shape):
    return torch.linspace(-1, 1, shape.numel(), device="cuda").view(shape)


@pytest.mark.parametrize(("hidden", "weight"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_skyrl_log_probs(skyrl, group, backend, hidden, weight, monkeypatch):
    """SkyRL's own contract: a fifth of the ids out of vocabulary. Its Triton products of fp32 are TF32 unless a test asks
    for IEEE ones, as SkyRL's own do."""
    monkeypatch.setattr(skyrl[1], "FORCE_FP32_IEEE_PRECISION", True)
    x, w, target = make(hidden=hidden, weight=weight, beyond=1024)
    arguments = (x, w, target, 0, w.shape[0], group)
    want = skyrl[0].from_parallel_hidden_to_logprobs(*arguments, fused_backend=backend)
    got = skyrl_adapter.from_parallel_hidden_to_logprobs(*arguments, fused_backend=backend)
    truth = logprobs_and_entropy(
        x[:, :-1], w, target[:, 1:], out_of_vocab="zero", ignore_index=-(2**62)
    )[0]
    out = target[:, 1:] >= w.shape[0]
    assert got.shape == want.shape == (4, 31) and (got[out] == 0).all() and 0 < int(out.sum())
    assert largest(got, truth) <= 1e-5
    # The host's torch logits are rounded to the weight's bf16.
    assert largest(got, truth) <= largest(want, truth) + 1e-6
    assert largest(got, want) <= (2e-2 if weight is BF16 and backend == "torch" else 1e-5)
    ours, theirs, exact = (
        torch.autograd.grad((y * upstream(y.shape).to(y.dtype)).sum(), (x, w)) for y in (got, want, truth)
    )
    for mine, host, true in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == host.dtype and relative(mine, true) <= (6e-3 if BF16 in (hidden, weight) else 5e-6)
        assert relative(mine, host) <= 3e-2


@pytest.mark.parametrize("hidden", [BF16, FP32])
def test_skyrl_triton_rounds_fp32_products_to_tf32(skyrl, group, hidden):
    """What a user sees beside lmhead with an fp32 weight: the host's default, three orders from fp64 where we are not."""
    x, w, target = make(hidden=hidden, weight=FP32)
    arguments = (x, w, target, 0, w.shape[0], group)
    want = skyrl[0].from_parallel_hidden_to_logprobs(*arguments, fused_backend="triton")
    got = skyrl_adapter.from_parallel_hidden_to_logprobs(*arguments, fused_backend="triton")
    truth = logprobs_and_entropy(x[:, :-1], w, target[:, 1:])[0]
    assert largest(got, truth) <= 1e-5 and 1e-4 <= largest(want, truth) <= 5e-3


@pytest.mark.parametrize(("n", "h", "v"), [(257, 128, 2048), (64, 256, 4096), (130, 640, 5003)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_skyrl_triton_log_prob_and_entropy(skyrl, n, h, v, temperature):
    x, w, ids = make(1, n, v, h)
    want = skyrl[1].linear_cross_entropy(x[0], w, ids[0], temperature, "none", None)
    got = verl_adapter.linear_cross_entropy(x[0], w, ids[0], temperature)
    truth = logprobs_and_entropy(x[0], w, ids[0], temperature=temperature)
    for mine, host, true in zip(got, want, truth, strict=True):
        assert largest(mine, host) <= 1e-4 and largest(mine, true) <= 2e-5
    ups = (upstream(torch.Size((n,))), upstream(torch.Size((n,))).flip(0))
    ours = torch.autograd.grad(got, (x, w), ups)
    theirs = torch.autograd.grad(want, (x, w), ups)
    exact = torch.autograd.grad(truth, (x, w), [u.double() for u in ups])
    for mine, host, true in zip(ours, theirs, exact, strict=True):
        assert relative(mine, true) <= 6e-3 and relative(mine, host) <= 1.5e-2
        assert relative(mine, true) <= relative(host, true) * 1.05


@pytest.mark.parametrize(("n", "h", "v"), [(64, 256, 4096), (33, 896, 151936)])
def test_verl_kernel(n, h, v):
    kernel = hosts.verl_kernel()
    x, w, labels = make(1, n, v, h)
    want = kernel.linear_cross_entropy(x[0], w, labels[0], 0.8)
    got = verl_adapter.linear_cross_entropy(x[0], w, labels[0], 0.8)
    for mine, host in zip(got, want, strict=True):
        assert mine.shape == host.shape and largest(mine, host) <= 1e-4
    ups = (upstream(torch.Size((n,))), upstream(torch.Size((n,))).flip(0))
    for mine, host in zip(torch.autograd.grad(got, (x, w), ups), torch.autograd.grad(want, (x, w), ups), strict=True):
        assert relative(mine, host) <= 1.5e-2


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 0.5)])
def test_trl_chunked_log_probs(dtype, softcap, scale):
    """TRL folds cuBLAS tiles with its own Triton kernel on a GPU."""
    host = hosts.trl()[0]
    x, w, t = make(1, 96, 4096, 256, dtype, dtype)
    x, t = x[0], t[0]
    options = (None, t, 0.8, 512, softcap, scale)
    want = host.ChunkedLogProbFunction.apply(x, w, *options, ("log_probs", "entropy"))
    got = trl_adapter.ChunkedLogProbFunction.apply(x, w, *options, ("log_probs", "entropy"))
    truth = logprobs_and_entropy(x, w, t, temperature=0.8, softcap=softcap, logit_scale=scale)
    for mine, its, true in zip(got[:2], want[:2], truth, strict=True):
        assert largest(mine, true) <= 2e-5 and largest(mine, its) <= (1e-4 if dtype is FP32 else 3e-2)
    ups = (upstream(t.shape), upstream(t.shape).flip(0))
    ours = torch.autograd.grad(got[:2], (x, w), ups)
    theirs = torch.autograd.grad(want[:2], (x, w), ups)
    for mine, its in zip(ours, theirs, strict=True):
        assert relative(mine, its) <= (1e-3 if dtype is FP32 else 3e-2)
