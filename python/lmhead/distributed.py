"""Collectives of a head whose vocabulary is spread over a torch.distributed group (gloo on the CPU, nccl on GPUs).

A forward makes one all-gather of a [N, 4] state; a backward makes none unless reduce_hidden_grad asks for one.
In checked mode (the CPU's default) one 512-byte header goes first: a rank whose arguments are bad, or differ from
the others', fails on every rank and nothing else is sent. A rank that is gone ends the others' call with a
RuntimeError, at the latest after the group's timeout (`init_process_group(timeout=...)`, `new_group(timeout=...)`).
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _core

#: Collectives of this process so far, by purpose: "header", "state" (the one of a forward), "hidden_grad",
#: "hidden" (sequence parallelism) and "context" (results of context-parallel ranks); and "bytes_sent".
counts: collections.Counter[str] = collections.Counter()

REDUCTIONS = (None, "sum", "reduce_scatter")


def vocab_shard(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, size) of the columns of `rank`: ceil(vocab_size / ranks) each, the last ones ragged or empty, as
    torch.chunk and DTensor cut."""
    if ranks < 1 or not 0 <= rank < ranks or vocab_size < 0:
        raise ValueError(f"rank: expected 0 <= rank < ranks and vocab_size >= 0, got {rank}, {ranks}, {vocab_size}")
    return _core.vocab_shard(vocab_size, rank, ranks)


def group_name(group: Any) -> str | None:
    """A group as operator schemas carry it."""
    return group if group is None or isinstance(group, str) else group.group_name


def resolve(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group


def rank_and_size(group: Any) -> tuple[int, int]:
    if group is None:
        return 0, 1
    resolved = resolve(group)
    return resolved.rank(), resolved.size()


def device_of(*values: Any) -> torch.device:
    """Of the first tensor; the CPU where there is none, so that a bad argument does not keep its rank from telling."""
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


def is_checked(check: bool | None, device: torch.device) -> bool:
    return device.type == "cpu" if check is None else check


@contextlib.contextmanager
def _explained(purpose: str, group: dist.ProcessGroup) -> Iterator[None]:
    """What a transport says about a rank that is gone, in words that name the call."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"group: expected all {group.size()} ranks in the {purpose} exchange, got a communication error on rank "
            f"{group.rank()} (a rank is gone, or did not answer within the group's timeout): {error}"
        ) from error


def _count(purpose: str, sent: int) -> None:
    counts[purpose] += 1
    counts["bytes_sent"] += sent


def _gather(purpose: str, own: Tensor, group: dist.ProcessGroup, out: Tensor) -> Tensor:
    """out [size * n, ...] gets every rank's `own` [n, ...] in rank order; own may be its part of out."""
    with _explained(purpose, group):
        dist.all_gather_into_tensor(out.view(-1), own.reshape(-1), group=group)
    _count(purpose, own.numel() * own.element_size() * (group.size() - 1))
    return out


def gather_rows(purpose: str, own: Tensor, group: Any, out: Tensor | None = None) -> Tensor:
    """[size * n, ...]: every rank's rows [n, ...] in rank order."""
    resolved = resolve(group)
    if out is None:
        out = own.new_empty((resolved.size() * own.shape[0], *own.shape[1:]))
    return _gather(purpose, own, resolved, out)


def _exchange(header: Any, group: dist.ProcessGroup, device: torch.device, shards: bool) -> None:
    own = torch.frombuffer(bytearray(header.bytes), dtype=torch.uint8).to(device)
    everyone = own.new_empty(group.size() * own.numel())
    _gather("header", own, group, everyone)
    everyone = everyone.cpu()
    header.check(everyone.data_ptr(), group.size(), shards)


class _Pending(threading.local):
    """Per thread: the groups whose other ranks wait for this call's header, and whether each holds one vocabulary."""

    groups: tuple[tuple[Any, bool], ...] = ()
    extra = 0


_pending = _Pending()


def _agree(header: Any, groups: tuple[tuple[Any, bool], ...], device: torch.device, error: Exception | None) -> None:
    """Exchanges headers over each group in turn. A failure in one is passed on to the next."""
    for group, shards in groups:
        try:
            _exchange(header, resolve(group), device, shards)
        except Exception as verdict:
            if error is None:
                error, header = verdict, _core.CallHeader(f"{type(verdict).__name__}: {verdict}")
    if error is not None:
        raise error


def settle(call: Any, name: str, group: Any, *, extra: int = 0) -> None:
    """Exchanges the headers of a checked call, over every group that waits for one. Raises on every rank if one of them
    may not go on."""
    groups = _pending.groups or (() if group is None else ((group, True),))
    if not groups:
        return
    header = _core.CallHeader(call.problem, call.execution, name, extra + _pending.extra)
    _pending.groups = ()
    _agree(header, groups, call.device, None)
    call.execution.set_check(False)  # values are checked


@contextlib.contextmanager
def reporting(
    group: Any, check: bool | None, device: torch.device, *, context: Any = None, extra: int = 0
) -> Iterator[None]:
    """Around a call on `group`: when it raises before settle(), the other ranks are told instead of left waiting.

    `context`: a group that runs the same call on other rows; it agrees after `group` does. `extra`: a number that must
    be the same on all ranks.
    """
    groups = tuple((g, g is group) for g in (group, context) if g is not None)
    if not groups or _pending.groups or not is_checked(check, device):
        yield
        return
    _pending.groups, _pending.extra = groups, extra
    try:
        yield
    except Exception as error:
        if _pending.groups:
            _agree(_core.CallHeader(f"{type(error).__name__}: {error}"), groups, device, error)
        raise
    finally:
        _pending.groups, _pending.extra = (), 0


def reduce_hidden_grad(part: Tensor, reduction: str, group: Any) -> Tensor:
    """The sum of all ranks' parts [N, H] in fp32: all of it, or with "reduce_scatter" this rank's rows."""
    resolved = resolve(group)
    size = part.numel() * part.element_size()
    with _explained("hidden_grad", resolved):
        if reduction == "sum":
            dist.all_reduce(part, group=resolved)
            result, steps = part, 2
        else:
            result, steps = part.new_empty((part.shape[0] // resolved.size(), *part.shape[1:])), 1
            dist.reduce_scatter_tensor(result.view(-1), part.view(-1), group=resolved)
    _count("hidden_grad", steps * size * (resolved.size() - 1) // resolved.size())
    return result
