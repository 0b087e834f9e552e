"""Bad input on tensors: the exception, and a message that names the argument."""

import lmhead
import pytest
import torch


def call(**change):
    arguments = {
        "hidden": torch.zeros(3, 5, 16),
        "weight": torch.zeros(41, 16),
        "targets": torch.zeros(3, 5, dtype=torch.int64),
    }
    return lmhead.linear_logprobs(**(arguments | change))


def grad(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 5, 41)}, ValueError, "hidden looks like logits"),
        ({"hidden": torch.zeros(3, 5, 17)}, ValueError, r"weight: expected \[V, 17\] to match hidden"),
        ({"hidden": torch.zeros(3, 5, 16, dtype=torch.int64)}, TypeError, "hidden: expected float32"),
        ({"hidden": torch.zeros(3, 5, 16, dtype=torch.float64)}, TypeError, "weight: expected the precision of hidden"),
        ({"hidden": torch.zeros(3, 5, 16, device="meta")}, ValueError, "hidden: expected a tensor on the CPU or a CUDA"),
        ({"weight": torch.zeros(41, 16, device="meta")}, ValueError, "weight: expected a tensor on cpu like hidden, got meta"),
        ({"weight": torch.zeros(41, 16).to(torch.float8_e4m3fn)}, TypeError, "weight: expected float32, bfloat16, float16 or float64, got float8_e4m3fn"),
        ({"weight": torch.zeros(16, 41).T}, ValueError, r"weight: expected contiguous columns .* pass weight.contiguous\(\)"),
        ({"weight": torch.zeros(656)}, ValueError, r"weight: expected \[V, H\] .* sharded or flattened parameter"),
        ({"weight": [[0.0]]}, TypeError, "weight: expected torch.Tensor like hidden, got list"),
        ({"targets": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, r"targets: expected \[3, 5\] to match hidden"),
        ({"targets": torch.zeros(3, 5, dtype=torch.uint16)}, TypeError, "targets: expected int32 or int64, got uint16"),
        ({"targets": torch.zeros(3, 5)}, TypeError, "targets: expected int32 or int64, got float32"),
        ({"targets": torch.full((3, 5), 41)}, ValueError, r"targets: expected ids in \[0, 41\)"),
        ({"bias": torch.zeros(40)}, ValueError, r"bias: expected \[41\], got \[40\]"),
        ({"bias": torch.zeros(41, 41)}, ValueError, r"bias: expected \[41\], got \[41, 41\]"),
        ({"bias": torch.tensor(0.0)}, ValueError, r"bias: expected \[41\], got \[\]"),
        ({"weight": torch.zeros(41, 16).to_sparse()}, TypeError, "weight: expected a dense torch.Tensor, got torch.sparse_coo"),
        ({"active": torch.ones(3, 5)}, TypeError, "active: expected bool or an integer type, got float32"),
        ({"active": torch.ones(3, 5, dtype=torch.complex64)}, TypeError, "active: expected bool, int8, int16, .* got complex64"),
        ({"active": torch.ones(15, dtype=torch.bool)}, ValueError, r"active: expected \[3, 5\]"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0, got 0"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature: expected \[3, 5\]"),
        ({"temperature": grad(3, 5)}, ValueError, "temperature: expected no gradient"),
        ({"temperature": grad()}, ValueError, "temperature: expected no gradient"),
        ({"temperature": [1.0] * 15}, TypeError, "temperature: expected a number, got list"),
        ({"temperature": torch.ones(3, 5, dtype=torch.complex64)}, TypeError, "temperature: expected real numbers, got complex64"),
        ({"softcap": "3"}, TypeError, "softcap: expected a number, got str"),
        ({"logit_scale": True}, TypeError, "logit_scale: expected a number, got bool"),
        ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got NoneType"),
        ({"valid_vocab": 41.0}, TypeError, "valid_vocab: expected an integer, got float"),
        ({"check": "no"}, TypeError, "check: expected a bool or None, got str"),
        ({"backend": 3}, TypeError, "backend: expected a name, got int"),
        ({"compute_dtype": "bfloat16"}, TypeError, "compute_dtype: expected a torch.dtype, got 'bfloat16'"),
        ({"softcap": grad()}, ValueError, "softcap: expected no gradient"),
        ({"logit_scale": grad()}, ValueError, "logit_scale: expected no gradient"),
        ({"logit_scale": torch.ones(2)}, TypeError, "logit_scale: expected a number, got a tensor"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number > 0, got 0"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale: expected a finite number"),
        ({"valid_vocab": 42}, ValueError, r"valid_vocab: expected in \[1, 41\], got 42"),
        ({"valid_vocab": torch.tensor(3.0)}, TypeError, "valid_vocab: expected an integer, got Tensor"),
        ({"valid_vocab": torch.tensor(42)}, ValueError, r"valid_vocab: expected in \[1, 41\], got 42"),
        ({"vocab_start": 1}, ValueError, "vocab_size: expected the global vocabulary"),
        ({"vocab_start": 8, "vocab_size": 64}, ValueError, "weight: expected the whole vocabulary"),
        ({"weight_main_grad": torch.zeros(40, 16)}, ValueError, r"weight_main_grad: expected \[41, 16\]"),
        ({"weight_main_grad": torch.zeros(41, 16).bfloat16()}, TypeError, "weight_main_grad: expected float32, got bfloat16"),
        ({"reduce_hidden_grad": "sum"}, ValueError, "reduce_hidden_grad: expected a group"),
        ({"compute_dtype": torch.int8}, TypeError, "compute_dtype: expected"),
        ({"backend": "cuda_portable"}, ValueError, "backend"),
        ({"out_of_vocab": "clamp"}, ValueError, 'out_of_vocab: expected "error" or "zero"'),
        ({"entropy_requires_grad": True}, ValueError, "entropy_requires_grad: expected return_entropy=True"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_a_dtensor_weight_is_told_what_to_do(tmp_path):
    """FSDP2 and tensor parallelism hold parameters as DTensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(41, 16), mesh, [Shard(0)]))
        with pytest.raises(TypeError, match=r"weight: expected a plain torch.Tensor, got a DTensor .*full_tensor\(\)"):
            call(weight=weight)
        assert call(weight=weight.full_tensor()).requires_grad  # what the message says works, gradient included
        call(weight=weight.full_tensor(), hidden=torch.randn(3, 5, 16)).sum().backward()
        assert weight.grad is not None and type(weight.grad).__name__ == "DTensor"
    finally:
        if ours:
            dist.destroy_process_group()


def test_nothing_is_written_when_an_argument_is_bad():
    main = torch.full((41, 16), 7.0)
    weight = torch.zeros(41, 16, requires_grad=True)
    with pytest.raises(ValueError):
        call(weight=weight, weight_main_grad=main, targets=torch.full((3, 5), 50))
    assert (main == 7).all()


def test_changing_a_saved_tensor_is_caught():
    weight = torch.zeros(41, 16, requires_grad=True)
    hidden = torch.zeros(3, 5, 16)
    logprob = call(weight=weight, hidden=hidden)
    hidden += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.sum().backward()
