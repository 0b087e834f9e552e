"""verl's fused linear cross entropy, against verl's own on a CPU (and its Triton kernel where there is a GPU)."""

import hosts
import pytest
import torch
from lmhead.adapters import verl as adapter
from plain import largest, logprobs_and_entropy, relative


@pytest.fixture(scope="module")
def verl():
    return hosts.verl()


def make(leading, h, v, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, h, generator=g).to(device, dtype).requires_grad_()
    # A million random numbers over and over, at a prime period, so that rows differ: half a billion would take a minute.
    block = torch.randn(1000003, generator=g).mul_(h**-0.5).to(dtype)
    w = block.repeat(-(-v * h // len(block)))[: v * h].view(v, h).to(device).requires_grad_()
    return x, w, torch.randint(0, v, leading, generator=g).to(device)


def grads(outputs, leaves):
    loss = sum((o.flatten() * torch.linspace(-1, 1, o.numel(), device=o.device) * k).sum() for k, o in enumerate(outputs, 1))
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("leading", [(37,), (3, 7)])
def test_against_the_hosts_torch_function(verl, leading, temperature):
    x, w, labels = make(leading, 96, 517)
    want = verl.FusedLinearForPPOFunction.apply(x, w, labels, temperature, 16)
    got = adapter.FusedLinearForPPO()(x, w, labels, temperature)
    flat = adapter.linear_cross_entropy(x, w, labels, temperature)
    for g, e, f in zip(got, want, flat, strict=True):
        assert g.shape == e.shape and g.dtype == torch.float32 and largest(g, e) <= 1e-5
        assert f.dim() == 1 and torch.equal(f, g.flatten())  # the kernel's results are flat
    for a, b in zip(grads(got, (x, w)), grads(want, (x, w)), strict=True):
        assert a.dtype == b.dtype and relative(a, b) <= 1e-5


def test_bf16_against_fp64(verl):
    x, w, labels = make((24,), 128, 1024, torch.bfloat16)
    got, want = adapter.linear_cross_entropy(x, w, labels), verl.FusedLinearForPPOFunction.apply(x, w, labels, 1.0, 8)
    truth = logprobs_and_entropy(x, w, labels)
    for g, e, host in zip(got, truth, want, strict=True):
        assert largest(g, e) <= 1e-5 < largest(host, e)
    for a, b in zip(grads(got, (x, w)), grads(truth, (x, w)), strict=True):
        assert relative(a, b) <= 6e-3


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "Mean"])
def test_reductions(reduction):
    x, w, labels = make((2, 5), 32, 64)
    logprobs, entropy = adapter.linear_cross_entropy(x, w, labels, 1.0, reduction, None)
    plain, _ = adapter.linear_cross_entropy(x, w, labels)
    want = {"none": plain, "sum": plain.sum(), "mean": plain.mean()}[reduction.lower()]
    assert torch.equal(logprobs, want) and entropy.shape == (10,)
    with pytest.raises(ValueError, match="reduction: expected"):
        adapter.linear_cross_entropy(x, w, labels, 1.0, "max")


# The head shapes of verl's own kernel tests.
@pytest.mark.parametrize(("h", "v"), [(3584, 152064), (896, 151936), (2048, 32256), (4096, 102400)])
def test_the_hosts_shapes_at_few_tokens(h, v):
    """Values and the gradient of hidden in bf16; the weight's would take gigabytes in the fp64 comparison."""
    x, w, labels = make((3,), h, v, torch.bfloat16)
    w.requires_grad_(False)
    logprobs, entropy = adapter.linear_cross_entropy(x, w, labels, 0.9)
    (dx,) = torch.autograd.grad((logprobs + 0.3 * entropy).sum(), x)
    with torch.no_grad():  # by the formulas, block by block: autograd would keep the weight in fp64
        blocks = w.split(8192)
        logp = torch.log_softmax(torch.cat([x.double() @ block.double().T / 0.9 for block in blocks], -1), -1)
        want = logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        dz = torch.nn.functional.one_hot(labels, v) - logp.exp() - 0.3 * logp.exp() * (logp + want[1][:, None])
        want_dx = sum(part @ block.double() / 0.9 for part, block in zip(dz.split(8192, -1), blocks, strict=True))
    # fp32 accumulation over H and over V.
    assert largest(logprobs, want[0]) <= 2e-5 and largest(entropy, want[1]) <= 2e-5
    assert relative(dx, want_dx) <= 6e-3


def test_installed_in_verl(verl, monkeypatch):
    kernel = hosts.verl_kernel()
    monkeypatch.setattr(kernel, "linear_cross_entropy", kernel.linear_cross_entropy)
    monkeypatch.setattr(verl, "FusedLinearForPPO", verl.FusedLinearForPPO)
    replaced = adapter.install()
    assert set(replaced) >= {f"{kernel.__name__}.linear_cross_entropy", f"{verl.__name__}.FusedLinearForPPO"}
    assert kernel.linear_cross_entropy is adapter.linear_cross_entropy
    assert adapter.install() == []
    x, w, labels = make((2, 5), 32, 64)
    assert verl.FusedLinearForPPO(impl_backend="torch").forward(x, w, labels)[0].shape == (2, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_against_the_hosts_triton_kernel():
    kernel = hosts.verl_kernel()
    x, w, labels = make((64,), 256, 4096, torch.bfloat16, "cuda")
    want, got = kernel.linear_cross_entropy(x, w, labels, 0.8), adapter.linear_cross_entropy(x, w, labels, 0.8)
    for g, e in zip(got, want, strict=True):
        assert g.shape == e.shape and largest(g, e) <= 1e-4
    upstream = [torch.linspace(-1, 1, 64, device="cuda"), torch.linspace(1, 0, 64, device="cuda")]
    for a, b in zip(torch.autograd.grad(got, (x, w), upstream), torch.autograd.grad(want, (x, w), upstream), strict=True):
        assert relative(a, b) <= 1e-2
