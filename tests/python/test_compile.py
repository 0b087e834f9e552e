"""The operators under torch.compile(fullgraph=True, dynamic=True), torch.library's own checks, and import order."""

import subprocess
import sys

import lmhead
import pytest
import torch
from lmhead import softmax_state  # noqa: F401  registers its operator
from plain import largest, relative

H, V = 16, 67


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(n=6):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, H, generator=g).requires_grad_()
    w = (torch.randn(V, H, generator=g) / H**0.5).requires_grad_()
    return x, w, torch.randint(0, V, (n,), generator=g)


def score(x, w, t, main=None):
    logprob, entropy = lmhead.linear_logprobs(
        x * 2, w, t, temperature=0.9, softcap=5.0, return_entropy=True, entropy_requires_grad=True, weight_main_grad=main
    )
    return (logprob * torch.arange(x.shape[0])).sum() + entropy.square().sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_length(backend):
    torch._dynamo.utils.counters.clear()  # other tests' graphs
    compiled = torch.compile(score, fullgraph=True, dynamic=True, backend=backend)
    for n in (6, 9, 33):
        x, w, t = make(n)
        got, want = compiled(x, w, t), score(x, w, t)
        assert relative(got, want) <= 1e-6  # inductor adds up in another order
        for a, b in zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
            assert relative(a, b) <= 1e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_main_grad_is_added_to_in_compiled_backwards(backend):
    x, w, t = make()
    main = torch.zeros(V, H)
    (want,) = torch.autograd.grad(score(x, w, t), w)
    compiled = torch.compile(score, fullgraph=True, dynamic=True, backend=backend)
    for times in (1, 2):
        compiled(x, w, t, main).backward()
        assert largest(main, times * want) <= 1e-5 and w.grad is None


def test_autocast_no_grad_and_metric_in_a_graph():
    x, w, t = make()

    def amp(x, w, t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lmhead.linear_logprobs(x, w, t, return_entropy=True)

    def quiet(x, w, t):
        with torch.no_grad():
            return lmhead.linear_logprobs(x, w, t, inference_only=True)

    for function in (amp, quiet):
        got = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")(x, w, t)
        want = function(x, w, t)
        for g, e in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert torch.equal(g, e) and g.requires_grad == e.requires_grad


def test_the_module_compiles():
    x, _, t = make()
    head = lmhead.LinearLogprobs(H, V, bias=True, ignore_index=3)
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, t), head(x, t))


@pytest.mark.parametrize("entropy", ["off", "metric", "grad"])
def test_torch_librarys_own_checks(entropy):
    """Schema, fake kernels (also with symbolic sizes) and autograd registration."""
    x, w, t = make()
    b = torch.randn(V).requires_grad_()
    options = (0.9, 5.0, 0.7, -100, "zero", 60, 0, None, entropy, None, 0, None, "auto", None)
    torch.library.opcheck(torch.ops.lmhead.linear_logprobs.default, (x, w, b, t, None, None, None, *options, None, 0))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.lmhead.softmax_state.default, (x, w, b, t, 0.9, 5.0, 0.7, None))
        _, entropies, lse, _ = torch.ops.lmhead.linear_logprobs.default(x, w, b, t, None, None, None, *options, None, 0)
        dentropy, saved = (torch.ones(6), entropies) if entropy == "grad" else (None, None)
        tensors = (torch.ones(6), dentropy, x.detach(), w.detach(), b.detach(), t, None, None, lse, saved, None)
        torch.library.opcheck(
            torch.ops.lmhead.linear_logprobs_backward.default, (*tensors, True, False, True, None, *options)
        )
        torch.library.opcheck(
            torch.ops.lmhead.linear_logprobs_backward_.default,
            (torch.zeros(V, H), *tensors, True, True, None, *options),
        )


@pytest.mark.parametrize("order", [("torch", "lmhead", "lmhead.torch_ops"), ("lmhead", "torch", "lmhead.torch_ops")])
def test_either_import_order_works_and_is_quick(order):
    code = f"""
import importlib, time
took = 0
for name in {order}:
    start = time.process_time()
    importlib.import_module(name)
    took += (name != "torch") * (time.process_time() - start)
import lmhead, torch
x, w = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
lmhead.linear_logprobs(x, w, torch.zeros(3, dtype=torch.int64)).sum().backward()
print(w.grad.shape[0], took)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, took = done.stdout.split()
    assert rows == "11" and float(took) <= 0.3
