"""The DP-aligned batch sampler: published cases, invariants, resume by itself and through torchdata."""

import asyncio
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import lmhead
from lmhead import DpAlignedBatchSampler as Sampler


def sizes(sampler):
    return [len(batch) for batch in sampler]


def test_two_hundred_equal_samples():
    batches = list(Sampler([300] * 200, 20, dp=2, variation=0.10, capacity=1000))
    assert len(batches) == 10 and all(18 <= len(batch) <= 22 for batch in batches)
    assert [i for batch in batches for i in batch] == list(range(200))
    assert all(batch.report.bins % 2 == 0 and batch.report.dummy_bins == 0 for batch in batches)
    assert all(abs(batch.report.size_error) <= 2 for batch in batches)


def test_published_cases():
    options = {"dp": 2, "variation": 0.10, "capacity": 1000}
    assert sizes(Sampler([300] * 44, 20, **options)) == [22, 18, 4]
    assert sizes(Sampler([300] * 44, 20, align=False, **options)) == [20, 20, 4]
    assert sizes(Sampler([300] * 5, 4, dp=4, capacity=1000)) == [4, 1]
    plain = list(Sampler([3] * 9, 4, align=False))
    assert [len(batch) for batch in plain] == [4, 4, 1]
    assert [batch.report.tokens for batch in plain] == [12, 12, 3]
    assert plain[2].report.examples == 1 and plain[2].report.bins is None
    counted = list(Sampler([3] * 9, 4, align=False, dp=2, capacity=6))
    assert [(b.report.bins, b.report.dummy_bins) for b in counted] == [(2, 0), (2, 0), (1, 1)]


def test_reset_repays_the_debt_in_that_epoch_only():
    sampler = Sampler([300] * 200, 20, dp=2, variation=0.10, capacity=1000, reset=(1, 3))
    first, second, third = sizes(sampler), sizes(sampler), sizes(sampler)
    assert first == third and sum(first[:3]) == 62
    assert second[:2] == first[:2] and sum(second[:3]) == 60
    resumed = Sampler([300] * 200, 20, dp=2, variation=0.10, capacity=1000)  # the reset travels with the state
    fresh = Sampler([300] * 200, 20, dp=2, variation=0.10, capacity=1000, reset=(1, 3))
    list(fresh)
    walk = iter(fresh)
    next(walk), next(walk)
    resumed.load_state_dict(fresh.state_dict())
    assert sizes(resumed) == second[2:]
    assert sizes(resumed) == first


def test_small_batches_still_move():
    batches = list(Sampler([600] * 28, 7, dp=2, capacity=1000))  # floor(7 * 0.05) is 0
    assert [len(batch) for batch in batches] == [8, 6, 8, 6]
    assert sum(batch.report.dummy_bins for batch in batches) == 0
    exact = list(Sampler([600] * 28, 7, dp=2, capacity=1000, variation=0))
    assert [len(batch) for batch in exact] == [7, 7, 7, 7]
    assert sum(batch.report.dummy_bins for batch in exact) == 4


def test_nearest_size_first_and_larger_on_ties():
    # One sample a bin and dp 2: every even size fits.
    assert sizes(Sampler([10] * 30, 10, dp=2, capacity=10, variation=0.3)) == [10, 10, 10]
    # Of an odd batch size both neighbours fit: the larger; then the debt asks for one less, and so on.
    assert sizes(Sampler([10] * 27, 9, dp=2, capacity=10, variation=0.3)) == [10, 8, 9]


def test_fewest_dummies_when_nothing_fits():
    # Sizes 3..5 need 3, 4, 5 bins: dp 8 leaves 5, 4, 3 dummies, so the largest; then its debt is repaid as far as
    # the running error allows.
    batches = list(Sampler([10] * 40, 4, dp=8, capacity=10))
    assert len(batches[0]) == 5 and batches[0].report.dummy_bins == 3
    assert len(batches) == 10 and sum(map(len, batches)) == 40


def test_reserve_goes_before_the_size_limits():
    # 33 samples, batch 16, dp 8: the third batch keeps 8 samples, so the first two give way below 16 - 1.
    batches = sizes(Sampler([10] * 33, 16, dp=8, capacity=10))
    assert batches == [16, 9, 8]
    # With less than dp a batch left, one each is reserved.
    assert sizes(Sampler([10] * 17, 8, dp=8, capacity=10)) == [8, 8, 1]


cases = st.builds(
    dict,
    lengths=st.lists(st.integers(1, 900), max_size=150),
    batch_size=st.integers(1, 24),
    dp=st.integers(1, 8),
    variation=st.sampled_from([0, 0.05, 0.3, 0.9]),
    sequence_multiple=st.sampled_from([1, 8]),
    total_multiple=st.sampled_from([1, 16]),
    shuffle=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(cases, st.integers(0, 40))
def test_invariants_and_exact_resume(case, stop):
    lengths, size, dp, variation = case["lengths"], case["batch_size"], case["dp"], case["variation"]
    make = lambda: Sampler(**case, capacity=1000, seed=5)
    sampler = make()
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-len(lengths) // size)
    flat = [i for batch in batches for i in batch]
    assert sorted(flat) == list(range(len(lengths))) and (case["shuffle"] or flat == sorted(flat))
    deviation = max(1, int(size * variation)) if variation else 0
    consumed = 0
    for k, batch in enumerate(batches):
        remaining = len(lengths) - consumed
        later = len(batches) - k - 1
        consumed += len(batch)
        assert batch
        if later == 0:
            continue
        reserve = dp if remaining >= dp * (later + 1) else 1
        assert len(lengths) - consumed >= reserve * later
        assert len(batch) <= size + deviation and consumed <= (k + 1) * size + deviation
        if remaining - reserve * later >= size + deviation:  # the reserve does not bind
            assert len(batch) >= size - deviation
        bins = lmhead.pack(
            [lengths[i] for i in batch],
            1000,
            sequence_multiple=case["sequence_multiple"],
            total_multiple=case["total_multiple"],
        )
        report = batch.report
        assert (report.batch, report.examples, report.bins) == (k + 1, len(batch), len(bins))
        assert report.dummy_bins == -len(bins) % dp
        assert report.tokens == sum(lengths[i] for i in batch)
        assert report.size_error == consumed - (k + 1) * size

    # Stop after some batches of the first or second epoch; the resumed sampler goes on with the same batches.
    following = [list(b) for b in batches] + [list(b) for b in sampler] + [list(b) for b in sampler]
    other, taken = make(), 0
    while taken < stop and taken < 2 * len(batches):
        for _ in other:
            taken += 1
            if taken == stop:
                break
        if not batches:
            break
    state = json.loads(json.dumps(other.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    rest = [list(b) for _ in range(3) for b in resumed]
    assert rest[: len(following) - taken] == following[taken:]


def test_epochs_and_set_epoch():
    make = lambda: Sampler([5] * 30, 7, capacity=20, shuffle=True, seed=3)
    sampler = make()
    epochs = [[list(batch) for batch in sampler] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    other = make()
    other.set_epoch(2)
    assert [list(batch) for batch in other] == epochs[2]
    assert [list(batch) for batch in Sampler([5] * 30, 7, capacity=20, shuffle=True, seed=4)] != epochs[0]
    # A loop that names the resumed epoch does not start it anew.
    walk = iter(sampler := make())
    next(walk)
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(0)
    assert [list(batch) for batch in resumed] == epochs[0][1:]


def test_leaving_an_epoch_starts_it_anew():
    sampler = Sampler([5] * 30, 7, capacity=20)
    for _ in sampler:
        break
    assert [list(b) for b in sampler] == [list(b) for b in Sampler([5] * 30, 7, capacity=20)]


def test_plain_and_asynchronous_streams():
    samples = [{"input_ids": list(range(n))} for n in (300, 200, 500, 400, 100, 250, 250)]
    length = lambda sample: len(sample["input_ids"])
    options = {"dp": 1, "capacity": 1000}
    expected = [list(b) for b in Sampler(length, 3, sampler=samples, **options)]
    assert [s for batch in expected for s in batch] == samples

    def generator():
        yield from samples

    class Stream:
        async def __aiter__(self):
            for sample in samples:
                await asyncio.sleep(0)
                yield sample

    assert [list(b) for b in Sampler(length, 3, sampler=generator(), num_samples=7, **options)] == expected

    async def collect(sampler):
        return [list(b) async for b in sampler]

    asynchronous = Sampler(length, 3, sampler=Stream(), num_samples=7, **options)
    assert asyncio.run(collect(asynchronous)) == expected
    assert asynchronous.epoch == 1 and asyncio.run(collect(asynchronous)) == expected
    assert asyncio.run(collect(Sampler(length, 3, sampler=samples, **options))) == expected, "a plain stream too"

    async def resume():
        first = Sampler(length, 3, sampler=Stream(), num_samples=7, **options)
        async for _ in first:
            break
        second = Sampler(length, 3, sampler=Stream(), num_samples=7, **options)
        second.load_state_dict(first.state_dict())
        return await collect(second)

    assert asyncio.run(resume()) == expected[1:]
    with pytest.raises(TypeError, match="async for"):
        iter(Sampler(length, 3, sampler=Stream(), num_samples=7, **options))


class Cursor:
    """A sampler that keeps its place itself, as trainers' stateful samplers do."""

    def __init__(self, order):
        self.order, self.position = order, 0

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        while self.position < len(self.order):
            self.position += 1
            yield self.order[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("kind", ["cursor", "torchdata"])
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 9, 10])
def test_streams_with_state_resume_exactly(kind, stop):
    lengths = np.random.default_rng(0).integers(1, 500, 50)

    def make(seed):
        if kind == "cursor":
            stream = Cursor(np.random.default_rng(1).permutation(50).tolist())
        else:
            stream = StatefulRandomSampler(range(50), generator=torch.Generator().manual_seed(seed))
        return Sampler(lengths, 10, dp=2, capacity=1000, variation=0.2, sampler=stream)

    reference = [list(b) for s in [make(7)] for _ in range(4) for b in s]
    first, taken = make(7), 0
    while taken < stop:
        for _ in first:
            taken += 1
            if taken == stop:
                break
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = make(99 if stop else 7)  # the generator's state comes from the checkpoint
    second.load_state_dict(state)
    rest = [list(b) for _ in range(3) for b in second]
    assert len(rest) >= 10 and rest[: 20 - stop] == reference[stop : stop + len(rest)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_torchdata_resumes_exactly(workers, stop):
    lengths = np.random.default_rng(2).integers(1, 500, 100).tolist()
    dataset = [torch.full((n,), i) for i, n in enumerate(lengths)]
    collator = lmhead.PackedCollator(1000, dp=2)

    def make():
        sampler = Sampler(lengths, 10, variation=0.2, shuffle=True, **collator.packing())
        return StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=collator, num_workers=workers)

    loader = make()
    whole = [batch["input_ids"] for _ in range(2) for batch in loader]
    assert len(whole) == 20 and len(loader) == 10
    first = make()
    for k, batch in enumerate(first, 1):
        assert (batch["num_bins"] + batch["num_dummy_bins"]) % 2 == 0
        if k == stop:
            state = first.state_dict()
            break
    second = make()
    second.load_state_dict(state)
    rest = [batch["input_ids"] for batch in second]
    assert len(rest) == 10 - stop
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[stop:]))
    assert all(torch.equal(a["input_ids"], b) for a, b in zip(second, whole[10:])), "the next epoch"


def test_as_a_torch_batch_sampler():
    loader = torch.utils.data.DataLoader(
        range(44), batch_sampler=Sampler([300] * 44, 20, dp=2, variation=0.1, capacity=1000), collate_fn=list
    )
    assert [len(batch) for batch in loader] == [22, 18, 4]


def test_errors():
    for arguments, message in [
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"dp": 0}, "dp: expected an integer >= 1, got 0"),
        ({"capacity": 0}, "capacity: expected an integer >= 1, got 0"),
        ({"capacity": None}, "capacity: expected tokens a bin with align=True, got None"),
        ({"variation": 1}, "variation: expected a number in [0, 1), got 1"),
        ({"variation": -0.1}, "variation: expected a number in [0, 1), got -0.1"),
        ({"variation": float("nan")}, "variation: expected a number in [0, 1), got nan"),
        ({"lengths": [3, 0]}, "lengths: expected integers >= 1, got 0"),
        ({"lengths": [11]}, "footprint <= capacity 10"),
        ({"algorithm": "magic"}, "Unknown packing algorithm"),
        ({"shuffle": True, "sampler": [0, 1]}, "shuffle: expected False with a sampler"),
        ({"num_samples": 5}, "num_samples: expected 2, the length of the stream, got 5"),
        ({"sampler": iter([0, 1])}, "num_samples: expected a number"),
        ({"lengths": len}, "num_samples: expected a number"),
        ({"reset": 3}, "reset: expected (epoch, batch), got 3"),
        ({"reset": (0, 0)}, "reset batch: expected an integer >= 1, got 0"),
        ({"reset": (0, 2)}, "reset batch: expected at most 1, the batches of an epoch, got 2"),
    ]:
        with pytest.raises(ValueError) as error:
            Sampler(**{"lengths": [3, 4], "batch_size": 4, "capacity": 10, **arguments})
        assert message in str(error.value)
    with pytest.raises(TypeError, match="batch_size: expected an integer, got 4.0"):
        Sampler([3], 4.0, capacity=10)


def test_streams_that_break_their_word():
    with pytest.raises(ValueError, match="expected 3 samples an epoch, got 2"):
        list(Sampler([1, 1, 1], 2, capacity=9, sampler=iter([0, 1]), num_samples=3))
    with pytest.raises(ValueError, match="expected 2 samples an epoch, got more"):
        list(Sampler([1, 1, 1], 2, capacity=9, sampler=iter([0, 1, 2]), num_samples=2))
    with pytest.raises(ValueError, match=r"sampler: expected an index in \[0, 3\), got 3"):
        list(Sampler([1, 1, 1], 2, capacity=9, sampler=[0, 3, 1]))
    unseeded = torch.utils.data.RandomSampler(range(50))
    sampler = Sampler([1] * 50, 5, capacity=9, sampler=unseeded)
    walk = iter(sampler)
    next(walk), next(walk)
    resumed = Sampler([1] * 50, 5, capacity=9, sampler=unseeded)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="expected the samples that it gave before the checkpoint, got others"):
        next(iter(resumed))


def test_foreign_state_is_refused():
    sampler = Sampler([1] * 9, 4, capacity=9)
    with pytest.raises(ValueError, match="state_dict: expected the entries"):
        sampler.load_state_dict({"epoch": 1})
    other = Sampler([1] * 9, 3, capacity=9)
    with pytest.raises(ValueError, match="batch_size: expected 3 as at the checkpoint, got 4"):
        sampler.load_state_dict(other.state_dict())
