"""lmhead.tune: choices, cache file, and the calls that follow."""

import json
import subprocess
import sys

import command
import lmhead
import numpy as np
import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_tune_measures_and_saves(cache):
    (tuned,) = lmhead.tune(64, 3000, 300, dtype="float32", device="cpu", seconds=0.1)
    assert (tuned.backend, tuned.operation, tuned.bucket) == ("cpu", "forward", 512)
    assert [t.configuration for t in tuned.times] == ["default", "rows_64", "rows_128"]
    assert tuned.times[0].of_default == 1 and tuned.turns >= 3 and tuned.warning == ""
    text = open(tuned.file).read()
    assert tuned.file.startswith(str(cache)) and f"forward 512 64 3000 float32 entropy - {tuned.configuration}" in text


def test_several_token_counts_and_no_file(cache):
    tuned = lmhead.tune(16, 40, np.array([100, 1000]), dtype="float32", device="cpu:0", seconds=0.05, save=False)
    assert [t.bucket for t in tuned] == [128, 1024]
    assert all(t.file == "" and t.warning == "" for t in tuned) and not list(cache.iterdir())


def test_a_place_that_cannot_be_written_is_a_warning(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    (tuned,) = lmhead.tune(16, 40, 100, dtype="float32", device="cpu", seconds=0.05)
    assert tuned.file == "" and "cannot create /proc/lmhead" in tuned.warning


def test_broken_file_warns_once_and_changes_nothing(cache):
    (tuned,) = lmhead.tune(16, 40, 100, dtype="float32", device="cpu", seconds=0.05)
    code = (
        "import numpy, lmhead; x = numpy.ones((4, 16), numpy.float32); w = numpy.ones((40, 16), numpy.float32)\n"
        "for _ in range(3): print(lmhead.linear_logprobs(x, w, numpy.zeros(4, numpy.int64))[0])"
    )

    def call():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    good = call()
    with open(tuned.file, "w") as file:
        file.write("not a cache\n")
    broken = call()
    assert good.stderr == "" and broken.stdout == good.stdout
    assert broken.stderr.count("lmhead: warning: tuning cache:") == 1 and tuned.file in broken.stderr
    np.testing.assert_allclose(float(good.stdout.split()[0]), -np.log(40), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": 0}, ValueError, "tokens: expected at least 1 and less than 2.31, got 0"),
        ({"tokens": [8, 4.5]}, TypeError, "tokens: expected an integer, got float"),
        ({"hidden_size": "8"}, TypeError, "hidden_size: expected an integer, got str"),
        ({"vocab_size": 0}, ValueError, "vocab_size: expected at least 1 and less than 2.31, got 0"),
        ({"softcap": "3"}, TypeError, "softcap: expected a number, got str"),
        ({"device": "cuda:x"}, ValueError, "device: expected cpu or cuda, got cuda:x"),
        ({"backend": 3}, TypeError, "backend: expected a name, got int"),
        ({"dtype": "int32"}, TypeError, "dtype: expected bfloat16, float16 or float32, got int32"),
        ({"entropy": "some"}, ValueError, "entropy: expected one of off, metric, grad, got 'some'"),
        ({"device": "tpu"}, ValueError, "device: expected cpu or cuda, got tpu"),
        ({"seconds": 0}, ValueError, "seconds: expected a number > 0"),
        ({"backend": "abacus"}, ValueError, "backend: expected auto"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"hidden_size": 8, "vocab_size": 8, "tokens": 8, "dtype": "float32", "device": "cpu"} | change
    with pytest.raises(error, match=message):
        lmhead.tune(**arguments)


def test_command(cache):
    arguments = ("tune", "--hidden", 64, "--vocab", 2100, "--tokens", "100,300", "--dtype", "float32", "--backend", "cpu")
    done = command.run(*arguments, "--seconds", 0.2, "--json")
    assert done.returncode == 0 and done.stderr == ""
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["op"], r["tokens"], r["bucket"], r["h"], r["v"]) for r in records] == [
        ("forward", 100, 128, 64, 2100),
        ("forward", 300, 512, 64, 2100),
    ]
    assert [t["configuration"] for t in records[0]["times"]] == ["default", "rows_64", "rows_128"]
    assert len({r["file"] for r in records}) == 1 and len(list((cache / "lmhead").glob("*.tuning"))) == 1
    dry = command.run("tune", "--hidden", 64, "--vocab", 2100, "--tokens", 100, "--dry-run", "--seconds", 0.1)
    assert dry.returncode == 0 and "saved" not in dry.stdout
    bad = command.run("tune", "--hidden", 64)
    assert bad.returncode == 2 and "--head: expected a name" in bad.stderr
