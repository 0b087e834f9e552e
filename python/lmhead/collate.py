"""Samples into packed rows: one row a bin, laid out by `PackedLayout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._arrays import integer, integers, is_torch
from .layout import PackedLayout, sequence_alignment, total_alignment
from .packing import pack

_SCALES = (None, "tokens", "loss_tokens")


class PackedCollator:
    """Packs a list of samples into rows for packed attention; usable as a `collate_fn`.

    A sample is a mapping with `input_ids` [T] and optionally `loss_mask`, whose t-th value weighs the prediction of
    token t: one value a token [T], or one for each of the last `num_actions` tokens. Without it every prediction
    counts. A bare sequence of ids is such a sample too.

    Args:
        max_tokens: footprint of a row; the capacity is max(max_tokens, A_t). A longer sample gets a row of its own.
        tp, cp, precision: parallel sizes of the layout.
        dp: data-parallel ranks: the number of rows is a multiple of it. Bin i goes to rank i % dp, and the rows of a
            rank follow each other, so that cutting the batch in dp equal parts gives each rank its own.
        algorithm: as for `lmhead.pack`.
        pad_id: id of padding.
        scale: None leaves loss_mask as it is; "tokens" divides it by the attended tokens of rows with samples,
            "loss_tokens" by the predictions with loss_mask other than 0, so that the sum of a loss over all ranks is a
            mean.

    Returns a dict; arrays are torch tensors, or NumPy with numpy=True:
        input_ids, position_ids, attention_mask: [R, W] int64; positions restart in each sequence.
        loss_mask: [R, W] fp32; value i weighs what row i predicts, the next token of its sequence: zero at the end
            of each sequence and on padding.
        cu_seqlens: list of R int32 vectors, padded offsets of each row's sequences; row totals are their last values.
        sub_seq_lengths: list of R lists of real lengths; `layouts` the R layouts; `sample_indices` the samples of
            each row. A bin without a sample has one attended token, loss_mask 0, and no sample index.
        num_examples, num_tokens, num_bins, num_dummy_bins: what is real, for logging.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        tp: int = 1,
        cp: int = 1,
        precision: str = "none",
        dp: int = 1,
        algorithm: str = "mffd",
        pad_id: int = 0,
        scale: str | None = None,
        numpy: bool = False,
    ):
        if integer("max_tokens", max_tokens) < 1:
            raise ValueError(f"max_tokens: expected an integer >= 1, got {max_tokens}")
        if integer("dp", dp) < 1:
            raise ValueError(f"dp: expected an integer >= 1, got {dp}")
        if scale not in _SCALES:
            raise ValueError(f"scale: expected None, 'tokens' or 'loss_tokens', got {scale!r}")
        self.parallel = {"tp": tp, "cp": cp, "precision": precision}
        self.capacity = max(max_tokens, total_alignment(**self.parallel))
        self.dp = dp
        self.algorithm = algorithm
        self.pad_id = integer("pad_id", pad_id)
        self.scale = scale
        self.numpy = bool(numpy)
        self.bins([])  # a bad algorithm shows now

    def packing(self) -> dict[str, Any]:
        """Arguments with which `DpAlignedBatchSampler` counts the same bins."""
        return {
            "capacity": self.capacity,
            "dp": self.dp,
            "algorithm": self.algorithm,
            "sequence_multiple": sequence_alignment(**self.parallel),
            "total_multiple": total_alignment(**self.parallel),
            "allow_oversize": True,
        }

    def bins(self, lengths: Sequence[int]) -> list[list[int]]:
        """Samples of each row, shard-major."""
        options = self.packing()
        dp = options.pop("dp")
        bins = pack(lengths, min_bins=dp, bin_multiple=dp, allow_empty=True, **options)
        return [bins[i] for shard in range(dp) for i in range(shard, len(bins), dp)]

    def __call__(self, samples: Sequence[Mapping[str, Any] | Sequence[int]]) -> dict[str, Any]:
        ids, weights = [], []
        for i, sample in enumerate(samples):
            ids.append(_ids(i, sample))
            weights.append(_weights(i, sample, ids[i].size))
        bins = self.bins([row.size for row in ids])
        lengths = [[ids[i].size for i in bin] or [1] for bin in bins]
        layouts = [PackedLayout(row, **self.parallel) for row in lengths]

        shape = len(bins), max((layout.total for layout in layouts), default=0)
        input_ids = np.full(shape, self.pad_id, np.int64)
        position_ids = np.zeros(shape, np.int64)
        attention_mask = np.zeros(shape, np.int64)
        loss_mask = np.zeros(shape, np.float32)
        for row, (bin, layout) in enumerate(zip(bins, layouts)):
            at = layout.global_rows
            attention_mask[row, at] = 1
            if not bin:
                continue
            position_ids[row, at] = np.concatenate([np.arange(n) for n in layout.lengths])
            input_ids[row, at] = np.concatenate([ids[i] for i in bin])
            tokens = layout.pad(np.concatenate([weights[i] for i in bin]))
            loss_mask[row, : layout.total] = layout.shift_mask(tokens)
        if self.scale is not None:
            count = sum(row.size for row in ids) if self.scale == "tokens" else np.count_nonzero(loss_mask)
            loss_mask /= np.float32(max(count, 1))

        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "loss_mask": loss_mask,
            "cu_seqlens": [np.asarray(layout.cu_seqlens_padded, np.int32) for layout in layouts],
        }
        if not self.numpy:
            import torch

            batch = {
                name: [torch.from_numpy(v) for v in value] if isinstance(value, list) else torch.from_numpy(value)
                for name, value in batch.items()
            }
        dummies = sum(not bin for bin in bins)
        return {
            **batch,
            "sub_seq_lengths": lengths,
            "layouts": layouts,
            "sample_indices": bins,
            "num_examples": len(ids),
            "num_tokens": sum(row.size for row in ids),
            "num_bins": len(bins) - dummies,
            "num_dummy_bins": dummies,
        }


def _ids(i: int, sample: Any) -> np.ndarray:
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ValueError(f"samples[{i}]: expected input_ids, got the fields {sorted(sample)}")
        sample = sample["input_ids"]
    ids = integers(f"samples[{i}]: input_ids", sample)
    if ids.size == 0:
        raise ValueError(f"samples[{i}]: input_ids: expected at least one token, got none")
    return ids


def _weights(i: int, sample: Any, tokens: int) -> np.ndarray:
    """[tokens] fp32: the weight of the prediction of each token."""
    mask = sample.get("loss_mask") if isinstance(sample, Mapping) else None
    if mask is None:
        return np.ones(tokens, np.float32)
    if is_torch(mask):
        mask = mask.detach().cpu().float().numpy()
    weights = np.asarray(mask, dtype=np.float32)
    sizes = {tokens}
    if "num_actions" in sample:
        actions = integer(f"samples[{i}]: num_actions", sample["num_actions"])
        if not 0 <= actions <= tokens:
            raise ValueError(f"samples[{i}]: num_actions: expected in [0, {tokens}], got {actions}")
        sizes.add(actions)
    if weights.ndim != 1 or weights.size not in sizes:
        expected = " or ".join(f"[{size}]" for size in sorted(sizes))
        raise ValueError(f"samples[{i}]: loss_mask: expected {expected}, got {list(weights.shape)}")
    return np.concatenate([np.zeros(tokens - weights.size, np.float32), weights])
