"""The packed segment layout: where every token of every sequence lies under tensor and context parallelism.

Thin views over the C++ derivation (include/lmhead/layout.h). Row kinds, used in every name:

    source row   row of the unpadded concatenation of all sequences, [num_tokens]
    global row   row of the padded layout, [total]
    local row    row of one context-parallel rank's shard, [local_total]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import integer, integers, is_array, mask_bytes, take

Array = Any  # numpy.ndarray or torch.Tensor; results are of the kind that came in


def sequence_alignment(tp: int = 1, cp: int = 1, precision: str = "none") -> int:
    """A_s: what each sequence of a packed row is padded to, 1 if cp == 1 else 2*tp*cp."""
    return _core.sequence_alignment(integer("tp", tp), integer("cp", cp), precision)


def total_alignment(tp: int = 1, cp: int = 1, precision: str = "none") -> int:
    """A_t: what a packed row's total is padded to. precision: "none", "fp8" or "mxfp8"."""
    return _core.total_alignment(integer("tp", tp), integer("cp", cp), precision)


def unpacked_alignment(tp: int = 1, cp: int = 1, precision: str = "none") -> int:
    """What the sequence dimension of an unpacked, padded batch is padded to."""
    return _core.unpacked_alignment(integer("tp", tp), integer("cp", cp), precision)


class PackedLayout:
    """Layout of one packed row, or of one micro-batch of them.

    Args:
        lengths: real tokens of each sequence, each >= 1.
        tp, cp: tensor- and context-parallel ranks.
        precision: "none", "fp8" or "mxfp8"; an automatic recipe must be resolved before.

    Attributes:
        lengths, padded_lengths: [S] tuples.
        cu_seqlens, cu_seqlens_padded: [S + 1] tuples of source and global offsets.
        num_tokens, total, local_total: source, global and local rows. Attention gets cu_seqlens_padded and total
            on every context-parallel rank.
        positions: per sequence its (row, column) in a padded batch, and batch_shape (rows, width) of that batch,
            for layouts made from one; else None.

    Index maps are int64 arrays; -1 means "no such row" (padding, or nothing to predict).
    """

    def __init__(self, lengths: Sequence[int] | Array, *, tp: int = 1, cp: int = 1, precision: str = "none"):
        self._adopt(_core.PackedLayout.make(integers("lengths", lengths), integer("tp", tp), integer("cp", cp), precision))

    def _adopt(self, core: Any) -> None:
        self._core = core
        self.tp: int = core.tp()
        self.cp: int = core.cp()
        self.precision: str = core.precision()
        self.lengths = tuple(core.lengths())
        self.padded_lengths = tuple(core.padded_lengths())
        self.cu_seqlens = tuple(core.cu_seqlens())
        self.cu_seqlens_padded = tuple(core.cu_seqlens_padded())
        self.num_tokens: int = core.num_tokens()
        self.total: int = core.total()
        self.local_total: int = core.local_total()
        self.positions: tuple[tuple[int, int], ...] | None = None
        self.batch_shape: tuple[int, int] | None = None
        self._maps: dict[Any, np.ndarray] = {}

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Sequence[int] | Array, *, tp: int = 1, cp: int = 1, precision: str = "none"
    ) -> PackedLayout:
        """From offsets [S + 1] of unpadded sequences: start at 0, rise strictly."""
        layout = cls.__new__(cls)
        layout._adopt(
            _core.PackedLayout.from_cu_seqlens(
                integers("cu_seqlens", cu_seqlens), integer("tp", tp), integer("cp", cp), precision
            )
        )
        return layout

    @classmethod
    def from_attention_mask(
        cls, attention_mask: Array, *, tp: int = 1, cp: int = 1, precision: str = "none"
    ) -> PackedLayout:
        """From a padded batch [B, S]: each row's attended tokens, one run of them, are one sequence.

        Rows without an attended token have no sequence. ValueError for a row with a hole.
        """
        mask = mask_bytes("attention_mask", attention_mask)
        if mask.ndim != 2:
            raise ValueError(f"attention_mask: expected [B, S], got {list(mask.shape)}")
        lengths = mask.sum(axis=1, dtype=np.int64)
        rows = np.flatnonzero(lengths)
        starts = mask.argmax(axis=1)[rows] if mask.shape[1] else np.empty(0, np.int64)
        columns = np.arange(mask.shape[1])
        run = (columns >= starts[:, None]) & (columns < (starts + lengths[rows])[:, None])
        holes = np.flatnonzero((run != mask[rows].astype(bool)).any(axis=1))
        if holes.size:
            raise ValueError(f"attention_mask: expected one run of attended tokens a row, got a hole in row {rows[holes[0]]}")
        layout = cls(lengths[rows], tp=tp, cp=cp, precision=precision)
        layout._place(rows, starts, mask.shape)
        return layout

    @classmethod
    def from_packed_rows(
        cls,
        sub_seq_lengths: Sequence[Sequence[int]],
        width: int,
        *,
        tp: int = 1,
        cp: int = 1,
        precision: str = "none",
    ) -> PackedLayout:
        """From packed rows [R, width] that are run as one micro-batch; sub_seq_lengths[r] are row r's sequences.

        The rows' sequences follow each other in one layout, which pays the total alignment once.
        """
        step = sequence_alignment(tp, cp, precision)
        rows, columns, lengths = [], [], []
        for row, sequences in enumerate(sub_seq_lengths):
            column = 0
            for length in integers(f"sub_seq_lengths[{row}]", sequences).tolist():
                rows.append(row)
                columns.append(column)
                lengths.append(length)
                column += -(-length // step) * step
        layout = cls(lengths, tp=tp, cp=cp, precision=precision)
        layout._place(np.array(rows, np.int64), np.array(columns, np.int64), (len(sub_seq_lengths), integer("width", width)))
        return layout

    def _place(self, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...]) -> None:
        self._maps["batch"] = self._core.batch_rows(rows, columns.astype(np.int64), *shape)
        self._maps["prediction"] = (
            self._core.prediction_rows(rows, columns.astype(np.int64), *shape) if shape[1] else np.empty(0, np.int64)
        )
        self.positions = tuple(zip(rows.tolist(), columns.tolist()))
        self.batch_shape = (int(shape[0]), int(shape[1]))

    def _key(self) -> tuple[Any, ...]:
        return self.lengths, self.tp, self.cp, self.precision, self.positions, self.batch_shape

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, PackedLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> tuple[Any, ...]:
        return self._key()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        lengths, tp, cp, precision, positions, batch_shape = state
        self.__init__(lengths, tp=tp, cp=cp, precision=precision)
        if batch_shape is not None:
            at = np.array(positions, np.int64).reshape(-1, 2)
            self._place(np.ascontiguousarray(at[:, 0]), np.ascontiguousarray(at[:, 1]), batch_shape)

    def __repr__(self) -> str:
        return (
            f"PackedLayout({len(self.lengths)} sequences, {self.num_tokens} tokens, total={self.total}, "
            f"tp={self.tp}, cp={self.cp}, precision={self.precision!r})"
        )

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._maps[name] = getattr(self._core, name)()
            self._maps[name].flags.writeable = False
        return self._maps[name]

    @property
    def source_rows(self) -> np.ndarray:
        """[total] source row of each global row; -1 for padding."""
        return self._map("source_rows")

    @property
    def global_rows(self) -> np.ndarray:
        """[num_tokens] global row of each source row."""
        return self._map("global_rows")

    @property
    def target_rows(self) -> np.ndarray:
        """[total] global row whose token each global row predicts; -1 where nothing is predicted."""
        return self._map("target_rows")

    @property
    def gathered_rows(self) -> np.ndarray:
        """[total] position of each global row in the concatenation of all context-parallel shards."""
        return self._map("gathered_rows")

    def local_rows(self, cp_rank: int) -> np.ndarray:
        """[local_total] global row of each local row of a context-parallel rank."""
        cp_rank = integer("cp_rank", cp_rank)
        if cp_rank not in self._maps:
            self._maps[cp_rank] = self._core.local_rows(cp_rank)
            self._maps[cp_rank].flags.writeable = False
        return self._maps[cp_rank]

    def _rows(self, name: str, values: Array, rows: int) -> Array:
        values = values if is_array(values) else np.asarray(values)
        if not values.shape or values.shape[0] != rows:
            raise ValueError(f"{name}: expected [{rows}, ...], got {list(values.shape)}")
        return values

    def pad(self, values: Array, fill: Any = 0) -> Array:
        """Source rows [num_tokens, ...] -> global rows [total, ...]; padding gets `fill`."""
        return take(self._rows("values", values, self.num_tokens), self.source_rows, fill)

    def unpad(self, values: Array) -> Array:
        """Global rows [total, ...] -> source rows [num_tokens, ...]."""
        return take(self._rows("values", values, self.total), self.global_rows)

    def shard(self, values: Array, cp_rank: int) -> Array:
        """Global rows [total, ...] -> this rank's local rows [local_total, ...]."""
        return take(self._rows("values", values, self.total), self.local_rows(cp_rank))

    def unshard(self, gathered: Array) -> Array:
        """The shards of all ranks, concatenated in rank order [total, ...] -> global rows [total, ...]."""
        return take(self._rows("gathered", gathered, self.total), self.gathered_rows)

    def shift_targets(self, input_ids: Array, ignore_index: int = -100) -> Array:
        """Targets of every global row: the next id of its sequence, `ignore_index` where nothing is predicted.

        Shift first, shard afterwards.
        """
        ids = self._rows("input_ids", input_ids, self.total)
        if "int" not in str(ids.dtype):
            raise TypeError(f"input_ids: expected integers, got {ids.dtype}")
        return take(ids, self.target_rows, ignore_index)

    def shift_mask(self, token_mask: Array) -> Array:
        """Row mask [total] from a token mask [total]: a row counts if the token that it predicts does."""
        return take(self._rows("token_mask", token_mask, self.total), self.target_rows, 0)

    def _batch(self) -> tuple[int, int]:
        if self.batch_shape is None:
            raise ValueError("layout: expected one made by from_attention_mask or from_packed_rows, got one without a batch")
        return self.batch_shape

    def from_batch(self, values: Array, fill: Any = 0) -> Array:
        """A padded batch [B, S, ...] -> global rows [total, ...]; padding gets `fill`."""
        rows, width = self._batch()
        values = values if is_array(values) else np.asarray(values)
        if tuple(values.shape[:2]) != (rows, width):
            raise ValueError(f"values: expected [{rows}, {width}, ...], got {list(values.shape)}")
        cells = np.full(self.total, -1, np.int64)
        taken = self._maps["batch"] >= 0
        cells[self._maps["batch"][taken]] = np.flatnonzero(taken)
        return take(values.reshape(rows * width, *values.shape[2:]), cells, fill)

    def from_prediction_batch(self, values: Array, fill: Any = 0) -> Array:
        """A prediction batch [B, S - 1, ...] (such as advantages) -> global rows [total, ...]."""
        rows, width = self._batch()
        values = values if is_array(values) else np.asarray(values)
        if tuple(values.shape[:2]) != (rows, max(width - 1, 0)):
            raise ValueError(f"values: expected [{rows}, {max(width - 1, 0)}, ...], got {list(values.shape)}")
        cells = np.full(self.total, -1, np.int64)
        taken = self._maps["prediction"] >= 0
        cells[self._maps["prediction"][taken]] = np.flatnonzero(taken)
        return take(values.reshape(rows * max(width - 1, 0), *values.shape[2:]), cells, fill)

    def to_batch(self, results: Array, fill: Any = 0) -> Array:
        """Results of global rows [total, ...] -> the original order [B, S - 1, ...].

        Cell (b, t) holds the result of the row that predicts the token at column t + 1; cells without one get `fill`.
        """
        rows, width = self._batch()
        results = self._rows("results", results, self.total)
        return take(results, self._maps["prediction"], fill).reshape(rows, max(width - 1, 0), *results.shape[1:])

    def active_spans(
        self, active: Array, cp_rank: int = 0, *, max_gap: int = _core.ACTIVE_SPAN_GAP
    ) -> tuple[tuple[int, int], ...]:
        """Spans [begin, end) of a rank's active local rows, from a mask over global rows [total].

        Runs that lie at most `max_gap` inactive rows apart are one span.
        """
        mask = mask_bytes("active", active, (self.total,))
        return tuple(self._core.active_spans(mask, integer("cp_rank", cp_rank), integer("max_gap", max_gap)))


def active_spans(active: Array, *, max_gap: int = _core.ACTIVE_SPAN_GAP) -> tuple[tuple[int, int], ...]:
    """Spans [begin, end) of active rows of an unpacked mask, flattened; runs at most `max_gap` rows apart are one."""
    return tuple(_core.active_spans(mask_bytes("active", active).reshape(-1), integer("max_gap", max_gap)))


def check_active_spans(spans: Sequence[tuple[int, int]], rows: int, active: Array | None) -> None:
    """ValueError unless `spans` are sorted, apart, not empty, inside [0, rows) and cover every active row.

    Spans without a mask are an error too: nothing says then what they must cover.
    """
    pairs = [(integer("spans", begin), integer("spans", end)) for begin, end in spans]
    mask = None if active is None else mask_bytes("active", active).reshape(-1)
    _core.check_active_spans(pairs, integer("rows", rows), mask)
