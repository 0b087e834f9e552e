"""Vocabulary shards over gloo processes: values, bits, gradients, traffic and faults."""

import ranks as processes
import distributed_cases as cases
import pytest
import torch

import lmhead
from lmhead import distributed

SIZE = 8


@pytest.fixture(scope="module")
def world():
    """Every case on one set of processes."""
    names = [f"shards_{tp}" for tp in (1, 2, 3, 4, 8)]
    results = processes.run(SIZE, [(cases.shards, (tp,)) for tp in (1, 2, 3, 4, 8)])
    return dict(zip(names, results, strict=True))


@pytest.fixture(scope="module")
def one_rank():
    return cases.whole()


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_values_and_gradients_of_one_rank(world, one_rank, tp):
    results = [r for r in processes.checked(world[f"shards_{tp}"]) if r is not None]
    assert len(results) == tp
    dw = torch.cat([r["dw"] for r in results])
    for r in results:
        if tp != 3:
            assert torch.equal(r["logprob"], one_rank["logprob"])
            assert torch.equal(r["entropy"], one_rank["entropy"])
        assert (r["logprob"] - one_rank["logprob"]).abs().max() <= 1e-4
        assert (r["entropy"] - one_rank["entropy"]).abs().max() <= 1e-4
        assert (r["dx_sum"] - one_rank["dx"]).abs().max() <= 5e-3
        assert torch.equal(r["dx_sum"], results[0]["dx_sum"])
    assert (dw - one_rank["dw"]).abs().max() <= 5e-3
    parts = torch.stack([r["dx"] for r in results]).sum(0)
    assert (parts - one_rank["dx"]).abs().max() <= 5e-3


def test_shards_cut_as_torch_chunk_does():
    for vocab in (1, 5, 8, 49155, 50257):
        for ranks in (1, 2, 3, 4, 8):
            sizes = [len(part) for part in torch.arange(vocab).chunk(ranks)]
            sizes += [0] * (ranks - len(sizes))
            shards = [distributed.vocab_shard(vocab, rank, ranks) for rank in range(ranks)]
            assert [size for _, size in shards] == sizes
            assert [start for start, _ in shards] == [sum(sizes[:r]) for r in range(ranks)]
