"""Which sequences share a packed row, and how full the rows are (include/lmhead/packing.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from ._arrays import integer, integers

ALGORITHMS = ("ffd", "mffd", "bfd", "concatenative", "balanced")


def packing_options(
    algorithm: str = "mffd",
    *,
    min_bins: int = 0,
    bin_multiple: int = 1,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    allow_empty: bool = False,
    allow_oversize: bool = False,
) -> Any:
    """The options of `pack` for the C++ library; a sampler makes them once."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm: expected a name, got {algorithm!r}")
    return _core.PackingOptions(
        algorithm,
        integer("min_bins", min_bins),
        integer("bin_multiple", bin_multiple),
        integer("sequence_multiple", sequence_multiple),
        integer("total_multiple", total_multiple),
        bool(allow_empty),
        bool(allow_oversize),
    )


def pack(
    lengths: Sequence[int],
    capacity: int,
    algorithm: str = "mffd",
    *,
    min_bins: int = 0,
    bin_multiple: int = 1,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    allow_empty: bool = False,
    allow_oversize: bool = False,
) -> list[list[int]]:
    """Packs sequences into bins of `capacity` tokens: original indices of each bin, every index once.

    A bin's footprint (each length rounded up to sequence_multiple, their sum rounded up to total_multiple) never
    exceeds the capacity. Deterministic; O(n log n).

    Args:
        lengths: list, NumPy array or torch tensor of integers > 0.
        algorithm: "mffd" (modified first-fit decreasing), "ffd", "bfd", "concatenative" (in order), "balanced"
            (longest first onto a fixed number of bins); the long names too, such as "first_fit_decreasing".
        min_bins, bin_multiple: at least this many bins, and a multiple of this (data-parallel ranks). Further bins
            take one sequence each from the fullest ones.
        sequence_multiple, total_multiple: `sequence_alignment` and `total_alignment` of the layout.
        allow_empty: further bins stay empty instead, and nothing is moved.
        allow_oversize: a sequence beyond the capacity gets its own bin.

    Raises:
        ValueError: a length or capacity <= 0, min_bins < 0, a multiple < 1, a sequence beyond the capacity, fewer
            sequences than bins ("Cannot create N bins with only M sequences"), "Unknown packing algorithm".
    """
    options = packing_options(
        algorithm,
        min_bins=min_bins,
        bin_multiple=bin_multiple,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
        allow_empty=allow_empty,
        allow_oversize=allow_oversize,
    )
    return _core.pack(integers("lengths", lengths), integer("capacity", capacity), options)


def packing_lower_bound(
    lengths: Sequence[int],
    capacity: int,
    *,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    allow_oversize: bool = False,
) -> int:
    """Martello and Toth's L2: no packing needs fewer bins. Arguments and errors as for `pack`."""
    options = packing_options(
        sequence_multiple=sequence_multiple, total_multiple=total_multiple, allow_oversize=allow_oversize
    )
    return _core.packing_lower_bound(integers("lengths", lengths), integer("capacity", capacity), options)


@dataclass(frozen=True)
class PackingMetrics:
    """How full the bins are."""

    sequences: int
    bins: int
    empty_bins: int
    lower_bound: int  #: L2
    tokens: int  #: real tokens
    footprint: int  #: tokens with all padding of the layout
    utilization: float  #: tokens / (bins * capacity)
    waste: float  #: bins / lower_bound - 1
    balance: float  #: 1 - sample standard deviation / mean of the bins' utilization; 1 for one bin


def packing_metrics(
    lengths: Sequence[int],
    capacity: int,
    bins: Sequence[Sequence[int]],
    *,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
    allow_oversize: bool = False,
) -> PackingMetrics:
    """Metrics of a packing of `lengths`; ValueError unless `bins` holds every index once."""
    options = packing_options(
        sequence_multiple=sequence_multiple, total_multiple=total_multiple, allow_oversize=allow_oversize
    )
    plain = [integers(f"bins[{i}]", bin).tolist() for i, bin in enumerate(bins)]
    metrics = _core.packing_metrics(integers("lengths", lengths), integer("capacity", capacity), plain, options)
    return PackingMetrics(**metrics)
