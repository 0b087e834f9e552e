"""What the ranks of test_adapters_sharded.py run. Groups are made in the same order everywhere."""

import hosts
import torch
import torch.distributed as dist
from lmhead.adapters import _parallel, megatron, skyrl, verl


def grid(tp, cp):
    """(tensor-parallel group, context-parallel group) of this rank among tp x cp ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([c * tp + t for t in range(tp)]) for c in range(cp)]
    across = [dist.new_group([c * tp + t for c in range(cp)]) for t in range(tp)]
    return groups[rank // tp], across[rank % tp]


def data(batch, length, hidden=32, vocab=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, hidden, generator=g)
    w = torch.randn(vocab, hidden, generator=g) / hidden**0.5
    return x, w, torch.randint(0, vocab + 16, (batch, length), generator=g)


def shard(w, group):
    size = w.shape[0] // dist.get_world_size(group)
    return w[dist.get_rank(group) * size :][:size]


def gradients(result, *leaves):
    upstream = torch.linspace(-1, 1, result.numel()).view(result.shape)
    return torch.autograd.grad((result * upstream).sum(), leaves)


def skyrl_packed(tp, cp):
    """(name -> (ours, the host's)) for packed sequences over tp x cp."""
    host = hosts.skyrl()
    tp_group, cp_group = grid(tp, cp)
    cu = torch.tensor([0, 8, 24, 32])
    x, w, target = data(1, 32)
    positions = torch.from_numpy(_parallel.zigzag_layout(cu, cp).local_rows(dist.get_rank(cp_group)))
    x, w = x[:, positions].clone().requires_grad_(), shard(w, tp_group).clone().requires_grad_()
    start = dist.get_rank(tp_group) * w.shape[0]
    mask = torch.zeros(3, 16)
    for row, length in enumerate((7, 16, 5)):
        mask[row, :length] = 1
    arguments = (x, w, target, cu, 16, start, start + w.shape[0], tp_group, False, cp_group, None, mask, None, 0.8)
    want = host.from_parallel_hidden_to_logprobs_packed_sequences(*arguments)
    got, entropy = skyrl.from_parallel_hidden_to_logprobs_packed_sequences(
        *arguments, return_entropy=True, entropy_requires_grad=True
    )
    result = {"logprob": (got, want)}
    result |= dict(zip(("dx", "dw"), zip(gradients(got, x, w), gradients(want, x, w), strict=True), strict=True))
    # The entropy of the host is a mean, over the last 9 positions of each row.
    loss_mask = mask[:, -9:].clone()
    metric, _ = host.from_parallel_hidden_to_entropy_packed_sequences(
        x.detach(), w.detach(), cu, 16, 9, mask, mask[:, -9:], cp_group, tp_group, temperature=0.8
    )
    loss_mask *= entropy.detach()[:, -9:] > 0  # a row's last token predicts nothing, and the host counts it
    ours = (entropy[:, -9:] * loss_mask).sum() / mask[:, -9:].sum()
    return {name: tuple(v.detach() for v in pair) for name, pair in (result | {"entropy": (ours, metric)}).items()}


def skyrl_padded(tp):
    host = hosts.skyrl()
    tp_group, _ = grid(tp, dist.get_world_size() // tp)
    x, w, target = data(2, 9)
    x, w = x.requires_grad_(), shard(w, tp_group).clone().requires_grad_()
    start = dist.get_rank(tp_group) * w.shape[0]
    arguments = (x, w, target, start, start + w.shape[0], tp_group)
    want = host.from_parallel_hidden_to_logprobs(*arguments)
    got = skyrl.from_parallel_hidden_to_logprobs(*arguments)
    pairs = zip(gradients(got, x, w), gradients(want, x, w), strict=True)
    return {"logprob": (got.detach(), want.detach())} | dict(zip(("dx", "dw"), pairs, strict=True))


def verl_sharded(tp):
    """Ours on a shard against ours on the whole head; dx summed over the ranks, as verl's caller does."""
    tp_group, _ = grid(tp, dist.get_world_size() // tp)
    x, whole, labels = data(1, 12)
    x, labels = x[0].requires_grad_(), labels[0] % 256
    w = shard(whole, tp_group).clone().requires_grad_()
    whole = whole.requires_grad_()
    got = verl.linear_cross_entropy(x, w, labels, 0.7, "none", tp_group)
    want = verl.linear_cross_entropy(x, whole, labels, 0.7)
    dx, dw = gradients(got[0] + got[1], x, w)
    want_dx, want_dw = gradients(want[0] + want[1], x, whole)
    dist.all_reduce(dx, group=tp_group)
    pairs = {"logprob": (got[0], want[0]), "entropy": (got[1], want[1]), "dx": (dx, want_dx), "dw": (dw, shard(want_dw, tp_group))}
    return {name: tuple(v.detach() for v in pair) for name, pair in pairs.items()}


def megatron_layer(tp, sequence_parallel):
    tp_group, _ = grid(tp, dist.get_world_size() // tp)
    x, whole, labels = data(3, 8)
    x, labels, whole = x.transpose(0, 1).contiguous().requires_grad_(), labels % 256, whole.requires_grad_()
    want = megatron.vocab_parallel_logprobs(x, whole, labels)
    want_dx, want_dw = gradients(want, x, whole)
    local = x.detach()
    if sequence_parallel:
        local = local.chunk(tp)[dist.get_rank(tp_group)]
        want_dx = want_dx.chunk(tp)[dist.get_rank(tp_group)]
    local, w = local.clone().requires_grad_(), torch.nn.Parameter(shard(whole.detach(), tp_group).clone())
    w.main_grad = torch.zeros(w.shape)
    got = megatron.vocab_parallel_logprobs(
        local, w, labels, tp_group=tp_group, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True
    )
    (got * torch.linspace(-1, 1, got.numel()).view(got.shape)).sum().backward()
    pairs = {"logprob": (got, want), "dx": (local.grad, want_dx), "dw": (w.main_grad, shard(want_dw, tp_group))}
    return {name: tuple(v.detach() for v in pair) for name, pair in pairs.items()}
