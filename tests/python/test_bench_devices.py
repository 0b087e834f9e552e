"""`lmhead bench` on each device, and what bench, verify and tune say where no CUDA backend runs."""

import json

import pytest
import torch

import command

SHAPE = ["--hidden", "32", "--vocab", "520", "--tokens", "40", "--reps", "2"]
FIELDS = (
    "op backend n h v dtype entropy active pattern ms gemm_ms units extra_mib logprob_err entropy_err dx_err dw_err "
    "baseline baseline_ms device driver commit command"
).split()
BACKENDS = ["cpu"] + ["cuda", "cuda_portable"] * torch.cuda.is_available()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_record_a_case(backend):
    flags = ["--op", "forward,forward_backward", "--entropy", "off,grad", "--active", "1,0.5", "--backend", backend, "--json"]
    done = command.run("bench", *SHAPE, *flags)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 8
    for record in records:
        assert set(FIELDS) <= set(record)
        assert record["ms"] > 0 and record["extra_mib"] >= 0
        assert (record["n"], record["h"], record["v"]) == (40, 32, 520)
        assert (record["driver"] is None) == (backend == "cpu") == (record["threads"] is not None)
        if backend != "cpu":
            assert record["units"] > 0 and record["gemm"] == "cuBLASLt bfloat16"
            assert record["backend"] in ("sm90", "cuda_portable")
        else:
            assert record["backend"] == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("subcommand", [["bench", *SHAPE], ["verify"], ["tune", "--hidden", "32", "--vocab", "520"]])
def test_without_a_device_one_line_says_so(subcommand):
    done = command.run(*subcommand, "--backend", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("lmhead: --backend: expected one that this machine runs, got cuda: ")
    assert "no usable CUDA device" in line or "this build has no CUDA" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("backend", ["cuda_portable", "sm90"])
def test_a_cuda_backend_by_name(backend):
    done = command.run("bench", *SHAPE, "--backend", backend)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lmhead: --backend: expected one that this machine runs, got {backend}: ")
