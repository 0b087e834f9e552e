"""Tensors on a GPU: the PyTorch package around the CUDA backends. Skips without one."""

import lmhead
import pytest
import torch
from lmhead import torch_ops
from plain import largest, logprobs_and_entropy, relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make(n=33, h=128, v=1031, dtype=torch.bfloat16, device="cuda"):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, h, generator=g).to(device, dtype).requires_grad_()
    w = (torch.randn(v, h, generator=g) / h**0.5).to(device, dtype).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=g).to(device)


def scored(x, w, t, **options):
    return lmhead.linear_logprobs(x, w, t, return_entropy=True, entropy_requires_grad=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients(dtype, softcap):
    x, w, t = make(dtype=dtype)
    got, want = scored(x, w, t, softcap=softcap), logprobs_and_entropy(x, w, t, softcap=softcap)
    for g, e in zip(got, want, strict=True):
        assert g.device == x.device and g.dtype == torch.float32 and largest(g, e) <= 1e-5
    tolerance = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 5e-6}[dtype]
    for a, b in zip(torch.autograd.grad(got[0].sum() + got[1].sum(), (x, w)),
                    torch.autograd.grad(want[0].sum() + want[1].sum(), (x, w)), strict=True):  # fmt: skip
        assert a.dtype == dtype and relative(a, b) <= tolerance
    assert lmhead.last_backend() in ("sm90", "cuda_portable")


def test_nothing_waits_for_the_gpu():
    x, w, t = make()
    active, temperature = torch.arange(33, device="cuda") % 2 > 0, torch.full((33,), 0.7, device="cuda")
    main = torch.zeros(w.shape, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprob, entropy = scored(x, w, t, active=active, temperature=temperature, weight_main_grad=main)
        (logprob.sum() + entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert main.abs().sum() > 0 and (logprob[~active] == 0).all()


def test_results_are_ordered_on_the_current_stream():
    x, w, t = make(n=512, h=512, v=8192)
    want = scored(x, w, t)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x * 1.0  # made on this stream: a launch elsewhere would read it unfinished
        got = scored(late, w, t)[0] + 0
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


def test_graph_capture():
    x, w, t = make()
    scored(x, w, t)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        scored(x, w, t)  # cuBLAS handles are made here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logprob, _ = scored(x, w, t)
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    assert largest(logprob, scored(x, w, t)[0]) == 0


@pytest.mark.parametrize("backend", ["auto", "cuda_portable"])
def test_a_captured_step_follows_the_mask(backend):
    """The count of active rows stays on the device: one graph serves every mask and every zero upstream gradient."""
    x, w, t = make(n=300, h=256, v=4104)
    active = torch.ones(300, dtype=torch.bool, device="cuda")
    upstream = torch.randn(300, generator=torch.Generator().manual_seed(1)).cuda()

    def step():
        logprob, entropy = scored(x, w, t, active=active, backend=backend)
        return logprob, entropy, *torch.autograd.grad(logprob - 0.1 * entropy, (x, w), upstream)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # cuBLAS handles are made here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for share in (1.0, 0.4, 0.0):
        chosen = torch.rand(300, generator=torch.Generator().manual_seed(2)) < share
        active.copy_(chosen)
        upstream[::7] = 0
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)
        assert (captured[0][~active] == 0).all() and (captured[2][~active] == 0).all()


def test_workspace_comes_from_pytorchs_allocator_within_the_budget():
    x, w, t = make(n=4096, h=256, v=32768)
    for budget in (64 << 20, 256 << 20):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            scored(x, w, t, workspace_bytes=budget)
        assert torch.cuda.max_memory_allocated() - before <= budget + (8 << 20)  # 4096 x 32768 fp32 logits are 512 MiB


def test_checked_mode_and_unchecked_nan():
    x, w, t = make()
    t[3] = 5000
    logprob = lmhead.linear_logprobs(x, w, t)
    assert torch.isnan(logprob[3]) and torch.isfinite(logprob[torch.arange(33) != 3]).all()
    with pytest.raises(ValueError, match="targets: expected ids in"):
        lmhead.linear_logprobs(x, w, t, check=True)


def test_mixed_devices_and_cpu_backends_are_errors():
    x, w, t = make()
    with pytest.raises(ValueError, match="targets: expected a tensor on cuda:0 like hidden, got cpu"):
        lmhead.linear_logprobs(x, w, t.cpu())
    with pytest.raises(ValueError, match="backend: cpu expected tensors on the CPU"):
        lmhead.linear_logprobs(x, w, t, backend="cpu")


def test_compile_and_autocast():
    x, w, t = make(dtype=torch.float32)
    compiled = torch.compile(lambda *a: scored(*a)[0].sum(), fullgraph=True, dynamic=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got, want = compiled(x, w, t), scored(x, w, t)[0].sum()
    assert relative(got, want) <= 1e-6
    exact = logprobs_and_entropy(x, w, t, compute_dtype=torch.bfloat16)[0].sum()
    assert relative(got, exact) <= 1e-5


needs_sm90 = pytest.mark.skipif(
    not any(b["name"] == "sm90" and b["available"] for b in lmhead.info()["backends"]), reason="no Hopper GPU"
)


@needs_sm90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("cache_bytes", [1 << 40, 4 << 20])  # all rows, and some
def test_a_cache_changes_no_result_and_repeats(dtype, softcap, cache_bytes):
    x, w, t = make(n=1000, h=256, v=4104, dtype=dtype)
    active = torch.arange(1000, device="cuda") % 5 > 0
    options = {"softcap": softcap, "active": active, "temperature": 0.8}
    plain, cached = scored(x, w, t, **options), scored(x, w, t, cache_bytes=cache_bytes, **options)
    for p, c in zip(plain, cached, strict=True):
        assert torch.equal(p, c)
    want = logprobs_and_entropy(x, w, t, softcap=softcap, temperature=0.8)
    loss = [(r[0] - 0.3 * r[1])[active].sum() for r in (plain, cached, want)]
    exact = torch.autograd.grad(loss[2], (x, w))
    first = torch.autograd.grad(loss[1], (x, w), retain_graph=True)
    again = torch.autograd.grad(loss[1], (x, w))
    for a, b, p, e in zip(first, again, torch.autograd.grad(loss[0], (x, w)), exact, strict=True):
        assert torch.equal(a, b)
        assert relative(a, e) <= 1.1 * relative(p, e)


@needs_sm90
def test_a_cache_is_kept_for_a_backward_only():
    x, w, t = make(n=2048, h=256, v=32768)

    def held(**options):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        results = scored(x, w, t, **options)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, results

    plain, cached = held()[0], held(cache_bytes=1 << 40)[0]
    room = torch_ops.cache_room(1 << 40, 2048, 32768)
    assert 2048 * 32768 * 2 <= room <= 2048 * 32768 * 2 * 1.18
    assert room <= cached - plain <= room + (2 << 20)  # PyTorch's allocator may hand out a multiple of 2 MiB
    assert held(cache_bytes=50 << 20)[0] - plain <= 50 << 20
    with torch.no_grad():
        assert held(cache_bytes=1 << 40)[0] <= plain


@needs_sm90
def test_a_cache_under_compile():
    x, w, t = make(n=300, h=256, v=4104)
    run = torch.compile(lambda *a: scored(*a, cache_bytes=1 << 30)[0].sum(), fullgraph=True, dynamic=True)
    for rows in (300, 200):
        got = torch.autograd.grad(run(x[:rows], w, t[:rows]), (x, w))
        want = torch.autograd.grad(scored(x[:rows], w, t[:rows], cache_bytes=1 << 30)[0].sum(), (x, w))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_a_cache_where_none_is_kept():
    x, w, t = make(dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="cache_bytes: expected 0 on backend cuda_portable, .* got 4096"):
        scored(x, w, t, cache_bytes=4096)
    with torch.no_grad():
        scored(x, w, t, cache_bytes=4096)
