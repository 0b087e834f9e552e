"""Tuning: measure a backend's configurations for a head and keep the better ones (include/lmhead/tuning.h)."""

from __future__ import annotations

from collections.abc import Sequence
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
    """
    if device is None:
        usable = {b["device"] for b in _core.backends() if b["available"]}
        device = "cuda" if "cuda" in usable else "cpu"
    name, _, index = str(device).partition(":")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    kind = _core.Device.cuda if name == "cuda" else _core.Device.cpu
    counts = [tokens] if isinstance(tokens, int) else list(tokens)
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
                inference_only=inference_only,
                seconds=seconds,
                save=save,
            ):
                times = tuple(TunedTime(*time) for time in found.pop("times"))
                tuned.append(Tuned(times=times, **found))
        return tuned

    if not index:
        return measure()
    import torch

    with torch.cuda.device(int(index)):
        return measure()
