"""What `make run` does, on two of its texts: a real model, scored and compared with torch; and a training step on it."""

import json
import os
import subprocess
import sys

import command
import torch
from safetensors.torch import load_file
from test_active import exact

import lmhead


def peak_mib(*arguments):
    """Peak resident size of a process of its own: what its libraries take, when it does nothing."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def test_real_model_end_to_end(real_batch):
    examples = command.ROOT / "examples"
    strings = json.loads((real_batch / "tokens.json").read_text())
    assert "".join(strings) == "".join((examples / "texts" / name).read_text() for name in ("soup.txt", "tides.txt"))

    compare = [sys.executable, examples / "compare_torch.py", "--lmhead", command.path(), "--out", real_batch]
    done = subprocess.run([*map(str, compare)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((real_batch / "summary.json").read_text())
    assert summary["within_bound"] is True and summary["scored"] == summary["tokens"] - 2
    assert 2.5 <= summary["mean_nll"] <= 3.5 and 2.5 <= summary["mean_entropy"] <= 3.5
    # 750 tokens of fp32 logits alone are 140 MiB; lmhead holds inputs, outputs and a workspace of at most 64 MiB.
    # A build with CUDA holds no more: cuBLASLt, 150 MiB, is opened by the first product on a GPU.
    assert summary["ways"]["lmhead"]["peak_mib"] <= peak_mib(command.path(), "info") + 64 + 57 + 20
    umask = os.umask(0)
    os.umask(umask)
    files = list(real_batch.rglob("*.safetensors"))
    names = ("batch", "model", "scores", "torch_bf16", "torch_fp32")
    assert sorted(file.name for file in files) == [f"{name}.safetensors" for name in names]
    assert all(file.stat().st_mode & 0o777 == 0o666 & ~umask for file in files)  # others may open what was made for them


def test_policy_step_on_a_real_model_with_half_of_the_advantages_zero(real_batch):
    """SmolLM2's own hidden states and head: the dense call's gradients within the bound, for half of its products."""
    hidden = load_file(real_batch / "batch.safetensors")["hidden"]
    ids = load_file(real_batch / "batch.safetensors")["input_ids"].long()
    (weight,) = load_file(next((real_batch / "model").glob("*.safetensors"))).values()
    hidden, targets = hidden[:128], ids[1:129]
    advantages = torch.randn(128, generator=torch.Generator().manual_seed(0))
    advantages[torch.arange(128) // 8 % 2 == 0] = 0.0  # whole groups agree
    gradients, products = [], []
    for active in (None, advantages != 0):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        before = lmhead._core.multiply_adds()
        logprob, entropy = lmhead.linear_logprobs(
            x, w, targets, active=active, return_entropy=True, entropy_requires_grad=True
        )
        between = lmhead._core.multiply_adds()
        ratio = torch.exp(logprob - logprob.detach())
        loss = -(ratio * advantages).mean() - 0.01 * (entropy * (advantages != 0)).mean()
        loss.backward()
        gradients.append((x.grad, w.grad))
        products.append((between - before, lmhead._core.multiply_adds() - between))
    one = hidden.shape[0] * weight.numel()
    # Rows without an upstream gradient leave the backward by themselves; the mask keeps them out of the forward too.
    assert products == [(one, 3 * one // 2), (one // 2, 3 * one // 2)]
    dx, dw = exact(hidden, weight, targets, -advantages / 128, -0.01 * (advantages != 0) / 128)
    for got in gradients:
        for g, want in zip(got, (dx, dw)):
            assert (g.double() - want).norm() <= 4e-3 * want.norm()  # bf16 dl and gradient, each rounded once
        assert got[0][advantages == 0].abs().sum() == 0
