"""Batches whose bin count is a multiple of the data-parallel size, without dummy bins.

A fixed batch size leaves a remainder of bins that the data-parallel ranks cannot share evenly, so some rank runs
dummies. Moving the boundary between two batches by a few samples mends that: order is kept, nothing is dropped, and
the running total of samples stays within a small bound of the fixed size.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._arrays import integer, integers
from .packing import packing_options


@dataclass(frozen=True)
class BatchReport:
    """What one batch holds, for logging: real counts, dummies apart."""

    epoch: int
    batch: int  #: counted from 1
    examples: int
    tokens: int
    bins: int | None  #: bins with samples; None without a capacity
    dummy_bins: int | None  #: empty bins that make the count a multiple of dp
    size_error: int  #: samples of the epoch so far minus batch * batch_size


class Batch(list):
    """The samples of one batch, in stream order; a list with a report."""

    def __init__(self, samples: Iterable[Any], report: BatchReport):
        super().__init__(samples)
        self.report = report

    def __reduce__(self):
        return Batch, (list(self), self.report)


class DpAlignedBatchSampler:
    """Batches of a sample stream; a torch `BatchSampler`, a plain iterable and an async iterable.

    Per batch and in total, sizes stay within max(1, floor(batch_size * variation)) samples of batch_size. Sizes are
    tried nearest first around the one that repays the running error, larger first on ties; the first whose bin count
    is a multiple of dp is taken, else the one with fewest dummies. Later batches have samples reserved (dp each if
    there are that many, else one), before any limit on sizes. The last batch takes the rest. An epoch has
    ceil(samples / batch_size) batches.

    Args:
        lengths: tokens of each sample, indexed by what the stream yields; or a function of a stream element.
        batch_size: samples a batch, >= 1.
        dp: data-parallel ranks, >= 1. Bin i of a batch goes to rank i % dp.
        capacity: tokens a bin; needed unless align=False.
        sampler: the stream: an iterable or async iterable that can be iterated once an epoch. Default: 0, 1, 2, ...,
            or a permutation with `shuffle`.
        num_samples: samples an epoch, where neither len(sampler) nor len(lengths) says so.
        shuffle, seed: without `sampler`: a permutation that depends on seed and epoch alone.
        variation: in [0, 1); 0 keeps sizes exact.
        align: False: fixed sizes; bins and dummies are still reported when there is a capacity.
        reset: (epoch, batch): that batch, counted from 1, repays the running error exactly, in that epoch only.
        algorithm, sequence_multiple, total_multiple, allow_oversize: as for `lmhead.pack`.

    Iterating gives `Batch` lists, each with its `report`; `last_report` is the latest one. An exhausted epoch starts
    the next; iterating again earlier starts the epoch anew. `state_dict` / `load_state_dict` resume after the latest
    batch exactly; a stream without state of its own must give the same samples again, which is checked.

    Raises:
        ValueError, TypeError: bad arguments; a stream shorter or longer than announced; on resume, another order.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Callable[[Any], int],
        batch_size: int,
        *,
        dp: int = 1,
        capacity: int | None = None,
        sampler: Any = None,
        num_samples: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        variation: float = 0.05,
        align: bool = True,
        reset: tuple[int, int] | None = None,
        algorithm: str = "mffd",
        sequence_multiple: int = 1,
        total_multiple: int = 1,
        allow_oversize: bool = False,
    ):
        self._length_of = lengths if callable(lengths) else None
        self._lengths = None if callable(lengths) else integers("lengths", lengths)
        if self._lengths is not None and self._lengths.size and self._lengths.min() < 1:
            raise ValueError(f"lengths: expected integers >= 1, got {self._lengths.min()}")
        self.batch_size = _at_least("batch_size", batch_size, 1)
        self.dp = _at_least("dp", dp, 1)
        self.capacity = None if capacity is None else _at_least("capacity", capacity, 1)
        if align and capacity is None:
            raise ValueError("capacity: expected tokens a bin with align=True, got None")
        if isinstance(variation, bool) or not isinstance(variation, (int, float)) or not 0 <= variation < 1:
            raise ValueError(f"variation: expected a number in [0, 1), got {variation!r}")
        self.variation = variation
        self.max_deviation = max(1, math.floor(batch_size * variation)) if variation > 0 and align else 0
        self.align = bool(align)
        self.sampler = sampler
        self.shuffle, self.seed = bool(shuffle), _at_least("seed", seed, 0)
        if shuffle and sampler is not None:
            raise ValueError("shuffle: expected False with a sampler, which sets the order, got True")
        self.num_samples = self._count_samples(num_samples)
        self.reset = None if reset is None else _reset_point(reset, len(self))
        self._packing = packing_options(
            algorithm,
            sequence_multiple=sequence_multiple,
            total_multiple=total_multiple,
            allow_oversize=allow_oversize,
        )
        self._check_packable()
        self.epoch = 0
        self.last_report: BatchReport | None = None
        self._walk: _Walk | None = None
        self._pending: dict[str, Any] | None = None

    def _count_samples(self, given: int | None) -> int:
        stream = self.sampler if self.sampler is not None else self._lengths
        counted = len(stream) if hasattr(stream, "__len__") else None
        if given is None and counted is None:
            raise ValueError("num_samples: expected a number, since neither the sampler nor lengths has one, got None")
        if given is not None:
            given = _at_least("num_samples", given, 0)
            if counted is not None and given != counted:
                raise ValueError(f"num_samples: expected {counted}, the length of the stream, got {given}")
        if self.sampler is None and self._length_of is not None:
            raise ValueError("sampler: expected the stream whose elements lengths(...) measures, got None")
        return counted if given is None else given

    def _check_packable(self) -> None:
        """Finds a sequence that fits no bin now, not in the middle of an epoch."""
        if self.capacity is not None and self._lengths is not None:
            _core.packing_lower_bound(self._lengths, self.capacity, self._packing)

    def __len__(self) -> int:
        """Batches an epoch."""
        return -(-self.num_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration runs; also told to the sampler, if that has set_epoch."""
        epoch = _at_least("epoch", epoch, 0)
        if epoch != self.epoch:
            self._pending = None  # a resumed epoch that is named once more stays resumed
        self.epoch = epoch

    def _start(self) -> _Walk:
        state, self._pending = self._pending, None
        if state is not None and state["finished"]:
            epoch, self.epoch = self.epoch, state["epoch"]
            _Walk(self, state).open()  # leaves a stream with state where that epoch left it
            self.epoch, state = epoch, None
        self._walk = _Walk(self, state)
        return self._walk

    def __iter__(self) -> Iterator[Batch]:
        if _is_async(self.sampler):
            raise TypeError("sampler: expected an iterable, got an async one: use `async for`")
        return self._start().batches()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._start().async_batches()

    def state_dict(self) -> dict[str, Any]:
        """Where the latest batch left the stream; plain integers unless the stream has state of its own."""
        if self._pending is not None:
            return dict(self._pending)
        walk = self._walk
        if walk is not None and (not walk.finished or self.epoch == walk.epoch + 1):
            state = walk.state_dict()
        else:
            state = {"epoch": self.epoch, "batch": 0, "consumed": 0, "checksum": 0, "finished": False}
        return {**state, "reset": self.reset, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which `state` was taken, in the next iteration."""
        missing = {"epoch", "batch", "consumed", "checksum", "finished", *self._identity()} - set(state)
        if missing:
            raise ValueError(f"state_dict: expected the entries {sorted(missing)}, got {sorted(state)}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(f"{name}: expected {state[name]} as at the checkpoint, got {value}")
        self.epoch = state["epoch"] + state["finished"]
        if self.reset is None and state.get("reset") is not None:
            self.reset = _reset_point(state["reset"], len(self))
        self._walk = None
        self._pending = dict(state)

    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "batch_size": self.batch_size, "seed": self.seed, "shuffle": self.shuffle}

    def _order(self) -> Any:
        """The stream of the current epoch."""
        if self.sampler is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self.epoch)
            return self.sampler
        if self.shuffle:
            return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples).tolist()
        return range(self.num_samples)

    def _length(self, sample: Any) -> int:
        if self._length_of is not None:
            return _at_least("lengths", self._length_of(sample), 1)
        index = integer("sampler", sample)
        if not 0 <= index < self._lengths.size:
            raise ValueError(f"sampler: expected an index in [0, {self._lengths.size}), got {index}")
        return int(self._lengths[index])

    def _bins(self, lengths: np.ndarray) -> int | None:
        return None if self.capacity is None else _core.count_bins(lengths, self.capacity, self._packing)

    def _choose(self, lengths: np.ndarray, low: int, high: int, wanted: int) -> tuple[int, int | None]:
        """Size and bin count of the next batch among sizes low..high, given the lengths of the next `high` samples."""
        best: tuple[int, int, int | None] | None = None  # dummies, size, bins
        for size in sorted(range(low, high + 1), key=lambda size: (abs(size - wanted), -size)):
            bins = self._bins(lengths[:size])
            dummies = 0 if bins is None else -bins % self.dp
            if best is None or dummies < best[0]:
                best = dummies, size, bins
            if dummies == 0:
                break
        assert best is not None
        return best[1], best[2]


class _Walk:
    """One pass over an epoch: the stream, the samples looked ahead at, and where it stands."""

    def __init__(self, owner: DpAlignedBatchSampler, state: dict[str, Any] | None):
        self.owner = owner
        self.epoch = owner.epoch
        self.batch = self.consumed = self.checksum = 0
        self.ahead: list[Any] = []  # samples read from the stream, not yet in a batch
        self.ahead_lengths: list[int] = []
        self.read = 0
        self.finished = False
        self.stream = owner._order()
        self.iterator: Any = None
        self.skip = 0
        self.resumed = state
        if state is not None:
            self.batch, self.consumed, self.checksum = state["batch"], state["consumed"], state["checksum"]

    # The stream. A stream that has state is asked for it, together with the samples looked ahead at; any other one is
    # read again from its start, and must give the samples that it gave before.

    def open(self) -> None:
        state, self.resumed = self.resumed, None
        stateful = state is not None and ("stream" in state or "iterator" in state)
        if stateful and state.get("stream") is not None:
            self.stream.load_state_dict(state["stream"])
        self.iterator = aiter(self.stream) if _is_async(self.stream) else iter(self.stream)
        if stateful and state.get("iterator") is not None:
            self.iterator.load_state_dict(state["iterator"])
        if stateful:
            for sample in state["ahead"]:
                self._add(sample)
            self.read = self.consumed + len(self.ahead)
        else:
            self.skip = self.consumed

    def state_dict(self) -> dict[str, Any]:
        if self.resumed is not None:
            return dict(self.resumed)
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "consumed": self.consumed,
            "checksum": self.checksum,
            "finished": self.finished,
        }
        if hasattr(self.stream, "state_dict"):
            state["stream"] = self.stream.state_dict()
        if self.iterator is not None and hasattr(self.iterator, "state_dict"):
            state["iterator"] = self.iterator.state_dict()
        if "stream" in state or "iterator" in state:
            state["ahead"] = list(self.ahead)
        return state

    def _add(self, sample: Any) -> None:
        length = self.owner._length(sample)
        self.ahead.append(sample)
        self.ahead_lengths.append(length)

    def _receive(self, sample: Any) -> None:
        self.read += 1
        if self.read > self.owner.num_samples:
            raise ValueError(f"sampler: expected {self.owner.num_samples} samples an epoch, got more")
        self._add(sample)
        if self.skip and self.read == self.skip:
            if self._checksum(self.skip, 0) != self.checksum:
                raise ValueError("sampler: expected the samples that it gave before the checkpoint, got others")
            del self.ahead[: self.skip], self.ahead_lengths[: self.skip]
            self.skip = 0

    def _checksum(self, count: int, start: int) -> int:
        columns = [np.asarray(self.ahead_lengths[:count], np.int64)]
        if self.owner._lengths is not None:
            columns.append(np.asarray(self.ahead[:count], np.int64))
        return zlib.crc32(np.stack(columns, axis=1).tobytes(), start)

    def _short(self) -> ValueError:
        return ValueError(f"sampler: expected {self.owner.num_samples} samples an epoch, got {self.read}")

    def _missing(self) -> bool:
        """Whether the next batch cannot be chosen yet; the last one needs the whole rest."""
        return bool(self.skip) or len(self.ahead) < self._limits()[1]

    def _limits(self) -> tuple[int, int, int]:
        """Smallest, largest and wanted size of the next batch."""
        owner = self.owner
        remaining, batches = owner.num_samples - self.consumed, len(owner) - self.batch
        if batches == 1:
            return remaining, remaining, remaining
        debt = self.batch * owner.batch_size - self.consumed
        wanted = owner.batch_size + debt
        low, high = wanted - owner.max_deviation, wanted + owner.max_deviation
        low = max(low, owner.batch_size - owner.max_deviation)
        high = min(high, owner.batch_size + owner.max_deviation)
        if not owner.align or owner.reset == (self.epoch, self.batch + 1):
            low = high = wanted
        reserve = owner.dp if owner.align and remaining >= owner.dp * batches else 1
        high = max(1, min(high, remaining - reserve * (batches - 1)))
        return max(1, min(low, high)), high, wanted

    def _next_batch(self) -> Batch:
        owner = self.owner
        low, high, wanted = self._limits()
        lengths = np.asarray(self.ahead_lengths[:high], np.int64)
        size, bins = owner._choose(lengths, low, high, wanted)
        self.checksum = self._checksum(size, self.checksum)
        samples = self.ahead[:size]
        del self.ahead[:size], self.ahead_lengths[:size]
        self.batch += 1
        self.consumed += size
        owner.last_report = BatchReport(
            epoch=self.epoch,
            batch=self.batch,
            examples=size,
            tokens=int(lengths[:size].sum()),
            bins=bins,
            dummy_bins=None if bins is None else -bins % owner.dp,
            size_error=self.consumed - self.batch * owner.batch_size,
        )
        return Batch(samples, owner.last_report)

    def _finish(self) -> None:
        self.finished = True
        if self.owner._walk is self:
            self.owner.epoch = self.epoch + 1

    def batches(self) -> Iterator[Batch]:
        self.open()
        while self.batch < len(self.owner):
            while self._missing():
                try:
                    sample = next(self.iterator)
                except StopIteration:
                    raise self._short() from None
                self._receive(sample)
                self._drain(next(self.iterator, _END) if self.read == self.owner.num_samples else _END)
            yield self._next_batch()
        self._finish()

    async def async_batches(self) -> AsyncIterator[Batch]:
        if not _is_async(self.stream):
            for batch in self.batches():
                yield batch
            return
        self.open()
        while self.batch < len(self.owner):
            while self._missing():
                try:
                    sample = await anext(self.iterator)
                except StopAsyncIteration:
                    raise self._short() from None
                self._receive(sample)
                self._drain(await anext(self.iterator, _END) if self.read == self.owner.num_samples else _END)
            yield self._next_batch()
        self._finish()

    def _drain(self, sample: Any) -> None:
        """After the last sample the stream must end; reading to its end lets a sampler start its next epoch."""
        if sample is not _END:
            self._receive(sample)


_END = object()


def _is_async(stream: Any) -> bool:
    return hasattr(stream, "__aiter__") and not hasattr(stream, "__iter__")


def _at_least(name: str, value: Any, least: int) -> int:
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {number}")
    return number


def _reset_point(reset: Any, batches: int) -> tuple[int, int]:
    try:
        epoch, batch = reset
    except (TypeError, ValueError):
        raise ValueError(f"reset: expected (epoch, batch), got {reset!r}") from None
    epoch, batch = _at_least("reset epoch", epoch, 0), _at_least("reset batch", batch, 1)
    if batch > batches:
        raise ValueError(f"reset batch: expected at most {batches}, the batches of an epoch, got {batch}")
    return epoch, batch
