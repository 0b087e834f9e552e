"""What `make run` does, on two of its texts: a real model, scored and compared with torch."""

import json
import subprocess
import sys

import command
import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")


def peak_mib(*arguments):
    """Peak resident size of a process of its own: what its libraries take, when it does nothing."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def test_real_model_end_to_end(tmp_path):
    examples = command.ROOT / "examples"
    texts = [examples / "texts" / name for name in ("soup.txt", "tides.txt")]
    make = [sys.executable, examples / "make_batch.py", "--out", tmp_path, *texts]
    subprocess.run([*map(str, make)], check=True, timeout=600, stderr=subprocess.DEVNULL)
    strings = json.loads((tmp_path / "tokens.json").read_text())
    assert "".join(strings) == "".join(text.read_text() for text in texts)

    compare = [sys.executable, examples / "compare_torch.py", "--lmhead", command.path(), "--out", tmp_path]
    done = subprocess.run([*map(str, compare)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["within_bound"] is True and summary["scored"] == summary["tokens"] - 2
    assert 2.5 <= summary["mean_nll"] <= 3.5 and 2.5 <= summary["mean_entropy"] <= 3.5
    # 750 tokens of fp32 logits alone are 140 MiB; lmhead holds inputs, outputs and a workspace of at most 64 MiB.
    # A build with CUDA links cuBLASLt, whose image alone is above 100 MiB: that is not ours to save.
    assert summary["ways"]["lmhead"]["peak_mib"] <= peak_mib(command.path(), "info") + 64 + 57 + 20
    assert (tmp_path / "scores.safetensors").exists()
