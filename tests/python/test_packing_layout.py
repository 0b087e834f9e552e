"""The packed segment layout through Python: round trips of NumPy arrays and torch tensors, gradients, active spans."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmhead
from lmhead import PackedLayout

layouts = st.builds(
    PackedLayout,
    st.lists(st.integers(1, 70), max_size=6),
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    cp=st.sampled_from([1, 2, 3, 4]),
    precision=st.sampled_from(["none", "fp8", "mxfp8"]),
)


def test_published_values():
    assert PackedLayout([7, 5, 3, 11], tp=4, precision="fp8").cu_seqlens_padded == (0, 7, 12, 15, 512)
    empty = PackedLayout([])
    assert (empty.padded_lengths, empty.cu_seqlens_padded, empty.total) == ((), (0,), 0)
    assert lmhead.sequence_alignment(4, 2) == 16 and lmhead.sequence_alignment(4, 1) == 1
    assert lmhead.total_alignment(2, 2, "FP8") == 512 and lmhead.total_alignment(4, 1, "mxfp8") == 128
    assert lmhead.unpacked_alignment(2, 8, "fp8") == 256
    assert PackedLayout.from_cu_seqlens([0, 7, 12], tp=4).lengths == (7, 5)


@settings(max_examples=200, deadline=None)
@given(layouts)
def test_invariants(layout):
    step = lmhead.sequence_alignment(layout.tp, layout.cp, layout.precision)
    total = lmhead.total_alignment(layout.tp, layout.cp, layout.precision)
    own = [-(-n // step) * step for n in layout.lengths]
    assert list(layout.padded_lengths[:-1]) == own[:-1]
    assert layout.total % total == 0 and 0 <= layout.total - sum(own) < total
    assert layout.local_total % layout.tp == 0

    tokens = np.arange(layout.num_tokens * 2).reshape(-1, 2)
    packed = layout.pad(tokens, fill=-9)
    assert (layout.unpad(packed) == tokens).all()
    assert (packed == -9).all(axis=1).sum() == layout.total - layout.num_tokens
    shards = [layout.shard(packed, rank) for rank in range(layout.cp)]
    assert {len(shard) for shard in shards} == {layout.local_total}
    assert (layout.unshard(np.concatenate(shards)) == packed).all()

    targets = layout.shift_targets(layout.pad(np.arange(layout.num_tokens)), ignore_index=-1)
    expected = np.full(layout.total, -1)
    for i, n in enumerate(layout.lengths):
        begin = layout.cu_seqlens_padded[i]
        expected[begin : begin + n - 1] = np.arange(layout.cu_seqlens[i] + 1, layout.cu_seqlens[i + 1])
    assert (targets == expected).all()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4)]))
def test_batch_round_trip(data, rows, width, parallel):
    mask = np.zeros((rows, width), np.int64)
    for row in range(rows):
        begin = data.draw(st.integers(0, width))
        mask[row, begin : data.draw(st.integers(begin, width))] = 1
    layout = PackedLayout.from_attention_mask(mask, tp=parallel[0], cp=parallel[1])
    assert layout.num_tokens == mask.sum()
    ids = np.where(mask, np.arange(rows * width).reshape(rows, width), -5)
    targets = layout.shift_targets(layout.from_batch(ids, fill=-6), ignore_index=-7)
    shards = np.concatenate([layout.shard(targets, rank) for rank in range(layout.cp)])
    back = layout.to_batch(layout.unshard(shards), fill=-8)
    assert back.shape == (rows, width - 1)
    both = mask[:, :-1].astype(bool) & mask[:, 1:].astype(bool)
    assert (back == np.where(both, ids[:, 1:], -8)).all()
    again = layout.from_prediction_batch(back, fill=-7)
    assert (again == targets).all()


def test_packed_rows_as_one_micro_batch():
    layout = PackedLayout.from_packed_rows([[7, 5], [3, 11]], 14, tp=4, precision="fp8")
    assert layout.cu_seqlens_padded == (0, 7, 12, 15, 512)
    assert layout.positions == ((0, 0), (0, 7), (1, 0), (1, 3))
    results = np.arange(512)
    assert layout.to_batch(results, -1).tolist() == [
        [0, 1, 2, 3, 4, 5, -1, 7, 8, 9, 10, -1, -1],
        [12, 13, -1, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24],
    ]
    assert PackedLayout.from_packed_rows([[3], [1]], 8, cp=2).positions == ((0, 0), (1, 0))
    with pytest.raises(ValueError, match="inside"):
        PackedLayout.from_packed_rows([[7, 5]], 11)


def test_layouts_travel_between_processes():
    plain = PackedLayout([7, 5], tp=2, cp=2, precision="fp8")
    batch = PackedLayout.from_attention_mask([[0, 1, 1], [1, 0, 0], [0, 0, 0]], cp=2)
    for layout in (plain, batch, PackedLayout([])):
        copy = pickle.loads(pickle.dumps(layout))
        assert copy == layout and hash(copy) == hash(layout) and copy.cu_seqlens_padded == layout.cu_seqlens_padded
    assert (copy := pickle.loads(pickle.dumps(batch))).to_batch(np.arange(copy.total), -1).tolist() == [
        [-1, 0],
        [-1, -1],
        [-1, -1],
    ]
    assert plain != PackedLayout([7, 5], tp=2, cp=2) and plain != 3


def test_torch_keeps_dtype_and_carries_gradients():
    layout = PackedLayout.from_attention_mask(torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]), tp=2, cp=2)
    values = torch.arange(layout.num_tokens * 3, dtype=torch.float64).reshape(-1, 3).requires_grad_()
    packed = layout.pad(values, fill=float("nan"))
    gathered = torch.cat([layout.shard(packed, rank) for rank in range(2)])
    restored = layout.to_batch(layout.unshard(gathered))
    assert restored.shape == (2, 3, 3) and not restored.isnan().any()
    restored.sum().backward()
    # Last tokens of a sequence have no cell in [B, S-1]; every other row is used once.
    assert values.grad[:, 0].tolist() == [1, 1, 0, 1, 0]
    ids = torch.tensor([[9, 1, 2, 3], [4, 5, 9, 9]], dtype=torch.int32)
    targets = layout.shift_targets(layout.from_batch(ids), ignore_index=-100)
    assert targets.dtype == torch.int32
    assert layout.to_batch(targets, fill=-1).tolist() == [[-1, 2, 3], [5, -1, -1]]
    mask = layout.shift_mask(layout.from_batch(torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)))
    assert mask.dtype == torch.bool and layout.to_batch(mask).tolist() == [[False, True, True], [True, False, False]]


def test_active_spans():
    def spans(lengths, rows, cp, precision="none"):
        layout = PackedLayout(lengths, cp=cp, precision=precision)
        active = np.zeros(layout.total, bool)
        for i, sequence in enumerate(rows):
            active[[layout.cu_seqlens_padded[i] + row for row in sequence]] = True
        return [layout.active_spans(active, rank) for rank in range(cp)]

    assert spans([10, 17], [{1, 2, 8}, {0, 1, 10, 15}], 4) == [((1, 6),), ((0, 1),), ((7, 8),), ((2, 6),)]
    assert spans([5], [{0, 2, 3}], 2) == [((0, 1),), ((0, 2),)]
    assert spans([31], [{0, 16, 24}], 2, "fp8") == [((0, 9),), ((8, 9),)]
    assert spans([31], [set()], 2) == [(), ()]
    unpacked = torch.zeros(1, 400, dtype=torch.int64)
    unpacked[0, 50:100] = unpacked[0, 300:320] = 1
    assert lmhead.active_spans(unpacked) == ((50, 100), (300, 320))
    for gap, expected in ((128, ((0, 130),)), (129, ((0, 1), (130, 131)))):
        mask = np.zeros(200, np.int8)
        mask[[0, gap + 1]] = 1
        assert lmhead.active_spans(mask) == expected


def test_active_span_errors():
    active = np.zeros(10, bool)
    active[[2, 3, 7]] = True
    lmhead.check_active_spans([(2, 4), (7, 8)], 10, active)
    lmhead.check_active_spans((), 10, None)
    for spans, mask in [
        ([(2, 4)], None),
        ([(7, 8), (2, 4)], active),
        ([(2, 5), (4, 8)], active),
        ([(2, 11)], active),
        ([(-1, 8)], active),
        ([(2, 3), (7, 8)], active),
        ([], active),
    ]:
        with pytest.raises(ValueError, match="active_spans"):
            lmhead.check_active_spans(spans, 10, mask)
    for mask in (active.astype(np.float32), active.astype(complex), torch.zeros(10, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="active: expected bool or integers"):
            lmhead.active_spans(mask)
    with pytest.raises(ValueError, match=r"active: expected \[4\], got \[10\]"):
        PackedLayout([4]).active_spans(active)


def test_errors():
    for make, message in [
        (lambda: PackedLayout([3, 0]), "lengths[1]: expected an integer >= 1, got 0"),
        (lambda: PackedLayout([], tp=0), "tp: expected an integer >= 1, got 0"),
        (lambda: PackedLayout([3], cp=-1), "cp: expected an integer >= 1, got -1"),
        (lambda: PackedLayout([3], precision="auto"), "precision: expected none, fp8 or mxfp8"),
        (lambda: PackedLayout.from_cu_seqlens([1, 2]), "cu_seqlens: expected offsets that start at 0, got 1"),
        (lambda: PackedLayout([3]).local_rows(1), "cp_rank: expected 0 <= cp_rank < 1, got 1"),
        (lambda: PackedLayout([3]).pad(np.zeros(4)), "values: expected [3, ...], got [4]"),
        (lambda: PackedLayout([3]).to_batch(np.zeros(3)), "layout: expected one made by from_attention_mask"),
        (lambda: PackedLayout.from_attention_mask([[1, 0, 1]]), "one run of attended tokens a row, got a hole in row 0"),
        (lambda: PackedLayout.from_attention_mask([1, 1]), "attention_mask: expected [B, S], got [2]"),
    ]:
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)
    with pytest.raises(TypeError, match="input_ids: expected integers, got float64"):
        PackedLayout([3]).shift_targets(np.zeros(3))
    with pytest.raises(TypeError, match="tp: expected an integer, got 1.0"):
        PackedLayout([3], tp=1.0)
