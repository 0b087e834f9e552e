"""The collator: widths, what each row holds, losses, dummy rows, data-parallel order."""

import numpy as np
import pytest
import torch

import lmhead
from lmhead import PackedCollator


def samples(lengths, start=1):
    ids, out = start, []
    for n in lengths:
        out.append({"input_ids": list(range(ids, ids + n))})
        ids += n
    return out


@pytest.mark.parametrize(
    "lengths, max_tokens, options, shape",
    [
        ([7, 5], 64, {"tp": 4}, (1, 12)),
        ([7, 5], 64, {"tp": 4, "precision": "fp8"}, (1, 512)),
        ([6, 5], 64, {"cp": 2}, (1, 16)),
        ([6, 5], 64, {"cp": 2, "precision": "fp8"}, (1, 32)),
        ([3, 3], 64, {}, (1, 6)),
        ([3, 3], 64, {"precision": "fp8"}, (1, 16)),
        ([3, 3], 64, {"tp": 2, "precision": "fp8"}, (1, 256)),
        ([17, 15], 32, {"tp": 4, "cp": 2}, (2, 32)),
        ([101], 101, {"cp": 2}, (1, 104)),
        ([3, 3], 1, {"precision": "fp8"}, (1, 16)),  # the capacity is never below A_t
        ([], 64, {"dp": 2}, (2, 1)),
    ],
)
def test_widths(lengths, max_tokens, options, shape):
    batch = PackedCollator(max_tokens, **options)(samples(lengths))
    for name in ("input_ids", "position_ids", "attention_mask", "loss_mask"):
        assert tuple(batch[name].shape) == shape
    assert all(tuple(layout.lengths) == tuple(row) for layout, row in zip(batch["layouts"], batch["sub_seq_lengths"]))


def test_what_a_row_holds():
    batch = PackedCollator(64, cp=2, pad_id=99)(
        [{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 0, 1, 0.5, 1]}, {"input_ids": torch.tensor([6, 7, 8])}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 99, 99, 99, 6, 7, 8, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]]
    # Row i weighs token i + 1 of its sequence: nothing at the ends, and token 0 of a sequence is never predicted.
    assert batch["loss_mask"].tolist() == [[0, 1, 0.5, 1, 0, 0, 0, 0, 1, 1, 0, 0]]
    assert batch["loss_mask"].dtype == torch.float32
    assert [c.tolist() for c in batch["cu_seqlens"]] == [[0, 8, 12]] and batch["cu_seqlens"][0].dtype == torch.int32
    assert batch["sub_seq_lengths"] == [[5, 3]] and batch["sample_indices"] == [[0, 1]]
    counts = [batch[name] for name in ("num_examples", "num_tokens", "num_bins", "num_dummy_bins")]
    assert counts == [2, 8, 1, 0]


def test_num_actions_cover_the_last_tokens():
    sample = {"input_ids": [1, 2, 3, 4], "num_actions": 2, "loss_mask": [1, 0]}
    assert PackedCollator(8)([sample])["loss_mask"].tolist() == [[0, 1, 0, 0]]
    assert PackedCollator(8)([{"input_ids": [1, 2], "num_actions": 0, "loss_mask": []}])["loss_mask"].tolist() == [[0, 0]]


def test_dummy_rows_and_scales():
    data = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [1, 0]}]
    batch = PackedCollator(8, dp=3, pad_id=7)(data)
    assert batch["input_ids"].tolist()[1:] == [[7] * 5] * 2
    assert batch["attention_mask"].sum(1).tolist() == [5, 1, 1]
    assert batch["loss_mask"].sum(1).tolist() == [2, 0, 0]
    assert batch["sub_seq_lengths"] == [[3, 2], [1], [1]] and batch["sample_indices"] == [[0, 1], [], []]
    assert (batch["num_bins"], batch["num_dummy_bins"], batch["num_tokens"]) == (1, 2, 5)
    tokens = PackedCollator(8, dp=3, scale="tokens")(data)["loss_mask"]  # dummies do not count
    assert torch.equal(tokens, batch["loss_mask"] * np.float32(1 / 5))
    loss_tokens = PackedCollator(8, dp=3, scale="loss_tokens")(data)["loss_mask"]
    assert loss_tokens.sum() == 1
    silent = PackedCollator(8, scale="loss_tokens")([{"input_ids": [1, 2], "loss_mask": [0, 0]}])["loss_mask"]
    assert silent.tolist() == [[0, 0]]


def test_rows_are_shard_major():
    lengths = [90, 80, 70, 60, 55]
    collator = PackedCollator(100, dp=2)
    bins = lmhead.pack(lengths, 100, min_bins=2, bin_multiple=2, allow_empty=True)
    assert len(bins) == 6
    batch = collator(samples(lengths))
    assert batch["sample_indices"] == [bins[0], bins[2], bins[4], bins[1], bins[3], bins[5]]
    first, second = batch["input_ids"].chunk(2)
    assert first[0, 0] == 1 and second[0, 0] == 91


def test_the_sampler_counts_the_collators_bins():
    lengths = np.random.default_rng(4).integers(1, 400, 300).tolist()
    collator = PackedCollator(1024, tp=2, cp=2, precision="fp8", dp=4)
    sampler = lmhead.DpAlignedBatchSampler(lengths, 60, variation=0.3, **collator.packing())
    data = samples(lengths)
    for indices in sampler:
        batch = collator([data[i] for i in indices])
        report = indices.report
        assert (batch["num_examples"], batch["num_tokens"]) == (report.examples, report.tokens)
        assert (batch["num_bins"], batch["num_dummy_bins"]) == (report.bins, report.dummy_bins)


def test_layouts_bring_results_back():
    """The targets of a packed, sharded micro-batch return to their rows' cells."""
    lengths = [9, 4, 1, 12, 6]
    batch = PackedCollator(24, tp=2, cp=2, numpy=True)(samples(lengths))
    ids, rows = batch["input_ids"], batch["sub_seq_lengths"]
    layout = lmhead.PackedLayout.from_packed_rows(rows, ids.shape[1], tp=2, cp=2)
    targets = layout.shift_targets(layout.from_batch(ids), ignore_index=-1)
    gathered = np.concatenate([layout.shard(targets, rank) for rank in range(2)])
    back = layout.to_batch(layout.unshard(gathered), fill=-1)
    predicts = batch["loss_mask"][:, :-1] > 0
    assert (back[predicts] == ids[:, 1:][predicts]).all() and (back[~predicts] == -1).all()
    assert predicts.sum() == sum(lengths) - len(lengths)


def test_errors():
    for make, message in [
        (lambda: PackedCollator(0), "max_tokens: expected an integer >= 1, got 0"),
        (lambda: PackedCollator(8, dp=0), "dp: expected an integer >= 1, got 0"),
        (lambda: PackedCollator(8, tp=0), "tp: expected an integer >= 1, got 0"),
        (lambda: PackedCollator(8, scale="mean"), "scale: expected None, 'tokens' or 'loss_tokens', got 'mean'"),
        (lambda: PackedCollator(8, algorithm="magic"), "Unknown packing algorithm"),
        (lambda: PackedCollator(8)([[1], []]), "samples[1]: input_ids: expected at least one token, got none"),
        (lambda: PackedCollator(8)([{"ids": 3}]), "samples[0]: expected input_ids, got the fields ['ids']"),
        (
            lambda: PackedCollator(8)([{"input_ids": [1, 2], "loss_mask": [1]}]),
            "samples[0]: loss_mask: expected [2], got [1]",
        ),
        (
            lambda: PackedCollator(8)([{"input_ids": [1, 2, 3], "loss_mask": [1], "num_actions": 2}]),
            "samples[0]: loss_mask: expected [2] or [3], got [1]",
        ),
        (
            lambda: PackedCollator(8)([{"input_ids": [1, 2], "loss_mask": [1], "num_actions": 3}]),
            "samples[0]: num_actions: expected in [0, 2], got 3",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)
    with pytest.raises(TypeError, match=r"samples\[0\]: input_ids: expected integers, got float64"):
        PackedCollator(8)([[1.5]])
