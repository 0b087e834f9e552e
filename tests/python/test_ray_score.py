"""examples/ray_score on a local cluster of two workers: results, one bad file, a kill and the run after it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmhead

pytest.importorskip("ray", reason="examples/ray_score/requirements.txt is not installed")

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "ray_score" / "score.py"


def command(folder, *more):
    batches = sorted(map(str, (folder / "in").glob("*.safetensors")))
    return [sys.executable, str(SCRIPT), *batches, "--model", str(folder / "model.safetensors"), "--out",
            str(folder / "out"), "--workers", "2", *more]  # fmt: skip


def test_two_workers_a_bad_file_a_kill_and_a_resume(tmp_path):
    generator = torch.Generator().manual_seed(5)
    umask = os.umask(0)
    os.umask(umask)
    weight = torch.randn(300, 16, generator=generator)
    save_file({"lm_head.weight": weight}, tmp_path / "model.safetensors")
    (tmp_path / "in").mkdir()
    batches = {}
    for i in range(8):
        x, ids = torch.randn(40, 16, generator=generator), torch.randint(0, 300, (40,), generator=generator)
        batches[f"b{i}.safetensors"] = (x, ids)
        save_file({"hidden": x, "input_ids": ids, "cu_seqlens": torch.tensor([0, 15, 40])}, tmp_path / "in" / f"b{i}.safetensors")
    save_file({"hidden": torch.randn(3, 9), "input_ids": torch.arange(3)}, tmp_path / "in" / "bad.safetensors")

    # Killed, workers and all, as soon as the first results are there.
    run = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 120
    while not list((tmp_path / "out").glob("*.safetensors")) and time.monotonic() < end and run.poll() is None:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
    assert done

    rerun = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=180)
    assert rerun.returncode == 1, rerun.stderr  # the bad file
    lines = [json.loads(line) for line in rerun.stdout.splitlines() if line.startswith("{")]
    # Workers of the killed run may have finished a file before they noticed.
    left = int(re.search(r"(\d+) of 9 files to score", rerun.stderr)[1])
    assert len(lines) == left <= 9 - len(done)
    assert [pathlib.Path(x["path"]).name for x in lines if x["error"]] == ["bad.safetensors"]
    assert "weight: expected" in next(x["error"] for x in lines if x["error"])
    for name, (x, ids) in batches.items():
        path = tmp_path / "out" / name
        assert name not in done or path.stat().st_mtime_ns == done[name]  # not scored twice
        want = lmhead.packed_logprobs(x, weight, ids, [0, 15, 40], return_entropy=True)
        got = load_file(path)
        assert torch.equal(got["logprob"], want[0]) and torch.equal(got["entropy"], want[1])
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # shared storage has other readers
    assert not (tmp_path / "out" / "bad.safetensors").exists()
