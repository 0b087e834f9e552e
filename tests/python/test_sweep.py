"""The sweep covers what it says, and so do its committed records."""

import collections
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def sweep(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sweep

    yield sweep
    for name in ("sweep", "skyrl_peer", "tile_skipping"):
        sys.modules.pop(name, None)


def test_points(sweep):
    assert len(sweep.LAYOUTS) == 10 and all(tp * cp <= 8 for tp, cp in sweep.LAYOUTS)
    forward = [p for p in sweep.points() if p.op == "sweep_forward"]
    assert len(forward) == 104 and sum(len(p.logical) for p in forward) == 200
    for p in forward:
        for point in p.logical:
            h, v = sweep.HEADS[point["head"]]
            assert (p.n * point["cp"], p.h, p.v * point["tp"]) == (point["tokens"], h, v)
    gradients = [p for p in sweep.points() if p.op == "sweep_forward_backward"]
    assert len(gradients) == len(sweep.HEADS) * len(sweep.ACTIVE)


def records_of(name):
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def test_records(sweep):
    records = records_of("sweep-nvidia-h200.jsonl")
    found = collections.Counter((r["op"], r["n"], r["h"], r["v"], r["active"]) for r in records)
    assert found == collections.Counter(p.key for p in sweep.points()), "every point once"
    for r in records:
        assert r["rounds"] >= 2 and r["first_call_ms"] > 0
        assert min(r["speedup_two_pass"], r["speedup_combined"]) > 1
        assert not any("error" in peer for peer in r["baselines"].values())


def test_masks_have_the_share_that_they_say(sweep):
    data = object.__new__(sweep.Data)
    data.device = "cpu"
    for active in sweep.ACTIVE:
        mask = data.mask(sweep.Point("sweep_forward_backward", 8192, 8, 8, active))
        assert abs(mask.float().mean().item() - active) < 0.01


def test_the_default_is_within_3_percent_of_the_tuned_choice(sweep):
    records = [r for r in records_of("tuned-nvidia-h200.jsonl") if (r["op"], r.get("entropy")) == ("tune_forward", "metric")]
    found = collections.Counter((r["n"], r["h"], r["v"]) for r in records)
    assert found == collections.Counter((p.n, p.h, p.v) for p in sweep.points() if p.op == "sweep_forward")
    for r in records:
        assert r["of_default"] == min(t["of_default"] for t in r["times"]) >= 0.97
