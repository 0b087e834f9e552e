"""The Megatron adapter on one rank: layouts and the main_grad protocol. Sharded, it is tested in test_adapters_sharded."""

import types

import pytest
import torch
from lmhead.adapters import megatron as adapter
from plain import largest, logprobs_and_entropy, relative

S, B, H, V = 7, 3, 16, 53


def make(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=g).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(V, H, generator=g) / H**0.5).to(dtype))
    return hidden, weight, torch.randint(0, V, (B, S), generator=g)


def test_sequence_first_hidden_and_batch_first_labels():
    hidden, weight, labels = make()
    temperature, active = torch.linspace(0.5, 2, B * S).view(B, S), torch.arange(B * S).view(B, S) % 4 > 0
    got = adapter.vocab_parallel_logprobs(
        hidden, weight, labels, temperature=temperature, active=active, return_entropy=True, entropy_requires_grad=True
    )
    want = logprobs_and_entropy(hidden.transpose(0, 1), weight, labels, temperature=temperature, active=active)
    for g, w in zip(got, want, strict=True):
        assert g.shape == (B, S) and largest(g, w) <= 5e-6
    for g, w in zip(torch.autograd.grad(sum(o.square().sum() for o in got), (hidden, weight)),
                    torch.autograd.grad(sum(o.square().sum() for o in want), (hidden, weight)), strict=True):  # fmt: skip
        assert relative(g, w) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_and_the_hooks_of_data_parallelism(dtype):
    """Megatron's hook on the parameter's accumulation node must run, find a gradient, and not add it again."""
    hidden, weight, labels = make(dtype)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(V, H), False
    seen = []

    def hook(*_):
        seen.append((weight.grad is not None, weight.grad_added_to_main_grad))
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]  # kept alive, as Megatron does
    accumulation.register_hook(hook)
    layer = types.SimpleNamespace(weight=weight, bias=None, tp_group=None, sequence_parallel=False,
                                  gradient_accumulation_fusion=True)  # fmt: skip
    for microbatch in range(2):
        adapter.output_layer_logprobs(layer, hidden, labels).sum().backward()
        assert seen == [(True, True)] * (microbatch + 1)
    (want,) = torch.autograd.grad(logprobs_and_entropy(hidden.transpose(0, 1), weight, labels)[0].sum(), weight)
    assert relative(weight.main_grad / 2, want) <= (2e-6 if dtype == torch.float32 else 6e-3)


def test_without_data_parallel_hooks_the_weight_gets_no_gradient():
    hidden, weight, labels = make()
    weight.main_grad = torch.zeros(V, H)
    adapter.vocab_parallel_logprobs(hidden, weight, labels, gradient_accumulation_fusion=True).sum().backward()
    assert weight.grad is None and weight.main_grad.abs().sum() > 0 and hidden.grad is not None


def test_tied_weight_and_errors():
    hidden, weight, labels = make()
    layer = types.SimpleNamespace(weight=None, bias=None)
    got = adapter.output_layer_logprobs(layer, hidden, labels, output_weight=weight)
    assert torch.equal(got, adapter.vocab_parallel_logprobs(hidden, weight, labels))
    layer.gather_output = True
    with pytest.raises(NotImplementedError, match="gather_output"):
        adapter.output_layer_logprobs(layer, hidden, labels, output_weight=weight)
    with pytest.raises(ValueError, match="main_grad"):
        adapter.vocab_parallel_logprobs(hidden, weight, labels, gradient_accumulation_fusion=True)
