"""Tuning: measure a backend's configurations for a head and keep the better ones (include/lmhead/tuning.h)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _core, _options


@dataclass(frozen=True)
class TunedTime:
    """One configuration's share in a measurement."""

    configuration: str
    ms: float  # median over turns
    of_default: float  # median over turns of its time / the default's in the same turn


@dataclass(frozen=True)
class Tuned:
    """The choice for one operation and all token counts of a bucket."""

    backend: str
    operation: str  # "forward" or "backward"
    bucket: int  # token count rounded up to a power of two, within [128, 2^20]
    configuration: str  # what later calls use
    times: tuple[TunedTime, ...]  # the default first
    turns: int
    file: str  # where it was saved; "" if it was not
    warning: str  # why it was not saved; "" when it was, or was not wanted


def tune(
    hidden_size: int,
    vocab_size: int,
    tokens: int | Sequence[int],
    *,
    dtype: Any = "bfloat16",
    entropy: str = "grad",
    inference_only: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    device: Any = None,
    backend: str = "auto",
    seconds: float = 4.0,
    save: bool = True,
) -> list[Tuned]:
    """Measures forward and backward of a head under each configuration of its backend, and keeps the better ones.

    The analytic default stays unless another configuration is at least 2 % faster. Later calls of this process use
    the choice, and those of others read it from a file under $XDG_CACHE_HOME/lmhead. No configuration changes a
    result bit. Call it before training, not inside a step: it allocates, and waits for the device.

    Args:
        hidden_size, vocab_size: H, and the rows of the weight on this rank (V / TP).
        tokens: rows of a call, or several counts. A choice serves all counts up to the same power of two.
        dtype: of hidden and weight: a name or a torch dtype.
        entropy: "off", "metric" or "grad", as the calls will run.
        inference_only: no backward will come: the forward alone is tuned.
        softcap, logit_scale: as in `linear_logprobs`.
        device: "cpu", "cuda", or a torch device; default: "cuda" where a CUDA backend is available.
        backend: "auto", or one of `info()`.
        seconds: of measuring an operation and token count; three turns of each configuration are made in any case.
        save: write the cache file. Without a place to write to, the results carry a warning.

    Returns:
        A choice for each token count and operation whose backend has more than one configuration.

    Raises:
        ValueError, TypeError: an argument breaks this contract; the message names it.
        NotImplementedError: the device or backend is not here.
        MemoryError: the problem does not fit.
    """
    if device is None:
        usable = {b["device"] for b in _core.backends() if b["available"]}
        device = "cuda" if "cuda" in usable else "cpu"
    place = re.fullmatch("cpu(?::[0-9]+)?|(cuda)(?::([0-9]+))?", str(device))
    if place is None:
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    kind = _core.Device.cuda if place[1] else _core.Device.cpu
    hidden_size, vocab_size = _size("hidden_size", hidden_size), _size("vocab_size", vocab_size)
    counts = [_size("tokens", count) for count in (tokens if isinstance(tokens, Iterable) else (tokens,))]
    softcap = None if softcap is None else _options.number("softcap", softcap)
    logit_scale, seconds = _options.number("logit_scale", logit_scale), _options.number("seconds", seconds)
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {type(backend).__name__}")
    data_type = _options.dtype_of("dtype", str(dtype).removeprefix("torch."))
    if entropy not in _options.ENTROPY_MODES:
        raise ValueError(f"entropy: expected one of {', '.join(_options.ENTROPY_MODES)}, got {entropy!r}")

    def measure() -> list[Tuned]:
        tuned = []
        for count in counts:
            for found in _core.tune(
                tokens=count,
                hidden=hidden_size,
                vocab=vocab_size,
                dtype=data_type,
                entropy=_options.ENTROPY_MODES[entropy],
                softcap=softcap,
                logit_scale=logit_scale,
                backend=backend,
                device=kind,
                inference_only=bool(inference_only),
                seconds=seconds,
                save=bool(save),
            ):
                times = tuple(TunedTime(*time) for time in found.pop("times"))
                tuned.append(Tuned(times=times, **found))
        return tuned

    if place[2] is None:
        return measure()
    import torch

    with torch.cuda.device(int(place[2])):
        return measure()


def _size(name: str, value: Any) -> int:
    size = _options.integer(name, value)
    if not 1 <= size < 2**31:
        raise ValueError(f"{name}: expected at least 1 and less than 2^31, got {size}")
    return size
