"""Vocabulary shards and packed sequences over gloo processes: values, bits, gradients, traffic and faults."""

import distributed_cases as cases
import plain
import pytest
import ranks as processes
import torch
from test_active import exact

import lmhead
from lmhead import distributed

TP = (1, 2, 3, 4, 8)
GRIDS = [(8, 1, True), (4, 2, False), (2, 4, True), (1, 4, False), (3, 2, False)]
LENGTHS = (7, 1, 12, 20, 3)
SKYRL = (2, 2, True, (64,), 256, 4096, torch.bfloat16)
FAULTS = {
    "target": "targets: expected ids in [0, 24)",
    "rows": "ranks disagree on N: expected the same on all ranks, got 5 on rank 0 and 4 on rank 1",
    "options": "ranks disagree on temperature: expected the same on all ranks, got 1 on rank 0 and 2 on rank 1",
    "flags": "entropy_requires_grad",
    "dtype": "targets: expected int32 or int64, got float32",
    "numpy": "hidden: expected torch.Tensor with group, got numpy.ndarray",
    "list": "hidden: expected torch.Tensor or numpy.ndarray, got list",
    "selected": "valid_vocab: expected an integer, got float",
    "support": "sampled_ids: expected [5] to match hidden [5, 8], got [4]",
}
PACKED_FAULTS = {
    "target": "targets: expected ids in [0, 24)",
    "ids": "ranks disagree on",
    "mask": "loss_mask: expected bool or an integer type, got torch.float32",
    "half mask": "loss_mask: expected bool or an integer type, got torch.bfloat16",
    "list": "loss_mask: expected torch.Tensor, got list",
    "support": "support_ids: expected int32, got int64",
}
MASKED = [(dtype, beyond) for dtype in (torch.float32, torch.bfloat16) for beyond in (False, True)]
SUPPORT_GRIDS = ((1, 1, False), (2, 1, True), (2, 2, False), (1, 4, False), (4, 2, True))


@pytest.fixture(scope="module")
def world():
    """Every case on one set of eight processes."""
    jobs = {("shards", tp): (cases.shards, (tp,)) for tp in TP}
    jobs |= {("packed", *grid): (cases.packed, (*grid, LENGTHS, 24, 264)) for grid in GRIDS}
    jobs |= {("skyrl",): (cases.packed, SKYRL), ("batch",): (cases.batch, (2, 2))}
    jobs |= {("metric", tp): (cases.metric, (tp,)) for tp in (2, 4)}
    jobs |= {("support", *grid): (cases.support, (*grid, LENGTHS)) for grid in SUPPORT_GRIDS}
    jobs |= {("masked", *case): (cases.masked, case) for case in MASKED}
    jobs |= {("fault", kind): (cases.fault, (kind,)) for kind in FAULTS}
    jobs |= {("packed fault", kind): (cases.packed_fault, (kind,)) for kind in PACKED_FAULTS}
    return dict(zip(jobs, processes.run(8, list(jobs.values())), strict=True))


def of(world, *key):
    """Results of the ranks that took part."""
    return [r for r in processes.checked(world[key]) if r is not None]


@pytest.fixture(scope="module")
def one_rank():
    return cases.whole()


def within(got, want, tolerance):
    return plain.largest(got, want) <= tolerance


@pytest.mark.parametrize("tp", TP)
def test_values_and_gradients_of_one_rank(world, one_rank, tp):
    results = of(world, "shards", tp)
    assert len(results) == tp
    for r in results:
        if tp != 3:
            assert torch.equal(r["logprob"], one_rank["logprob"])
            assert torch.equal(r["entropy"], one_rank["entropy"])
        assert within(r["logprob"], one_rank["logprob"], 1e-4) and within(r["entropy"], one_rank["entropy"], 1e-4)
        assert within(r["dx_sum"], one_rank["dx"], 5e-3) and torch.equal(r["dx_sum"], results[0]["dx_sum"])
    assert within(torch.cat([r["dw"] for r in results]), one_rank["dw"], 5e-3)
    assert within(torch.stack([r["dx"] for r in results]).sum(0), one_rank["dx"], 5e-3)


@pytest.mark.parametrize(("dtype", "beyond"), MASKED, ids=str)
def test_inactive_rows_over_two_ranks(world, dtype, beyond):
    """The bits of the dense call on one rank where the mask is set, zeros elsewhere, and its gradients."""
    d = cases.masked_data(dtype, beyond)
    options = {"out_of_vocab": "zero", "return_entropy": True}
    dense = lmhead.linear_logprobs(d["x"], d["w"], d["targets"], **options)
    mask = d["mask"].view(-1)
    a, g = (torch.where(mask, d[name].view(-1), 0.0) for name in "ag")
    dx, dw = exact(d["x"].view(576, -1), d["w"], d["targets"].view(-1), a, g)
    results = of(world, "masked", dtype, beyond)
    assert len(results) == 2
    for r in results:
        for got, want in zip((r["logprob"], r["entropy"]), dense, strict=True):
            assert torch.equal(got, torch.where(d["mask"], want, 0.0))
        assert r["dx"].view(576, -1)[~mask].abs().sum() == 0
        assert plain.relative(r["dx"].view(576, -1), dx) <= (4e-3 if dtype == torch.bfloat16 else 2e-6)
    assert plain.relative(torch.cat([r["dw"] for r in results]), dw) <= (4e-3 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("tp", TP)
def test_one_all_gather_a_forward_and_none_a_backward(world, tp):
    rows = cases.ROWS[0] * cases.ROWS[1]
    for r in of(world, "shards", tp):
        assert r["counts"] == {"header": 1, "state": 1, "bytes_sent": (tp - 1) * (512 + 16 * rows)}


def packed_truth(lengths, hidden, vocab, dtype=torch.float32):
    """fp64 of the same tokens on one rank."""
    d = cases.packed_data(lengths, hidden, vocab)
    x, w = d["x"].to(dtype).double().requires_grad_(), d["w"].double().requires_grad_()
    targets = d["ids"].roll(-1)
    targets[torch.tensor(lengths).cumsum(0) - 1] = -100
    logprob, entropy = plain.logprobs_and_entropy(x, w, targets, temperature=d["temperature"], active=d["mask"])
    (logprob * d["a"] + entropy * d["g"]).sum().backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "dx": x.grad, "dw": w.grad}


def assemble(results, tp, cp, sequence_parallel, lengths):
    """dX in source order and the whole dW, summed over CP."""
    by_rank = {(r["tp_rank"], r["cp_rank"]): r for r in results}
    layout = lmhead.PackedLayout(lengths, tp=tp, cp=cp)
    parts = []
    for c in range(cp):
        shares = [by_rank[t, c]["dx"] for t in range(tp)]
        assert sequence_parallel or all(torch.equal(s, shares[0]) for s in shares)
        parts.append(torch.cat(shares) if sequence_parallel else shares[0])
    whole = layout.unshard(torch.cat(parts))
    assert not whole[torch.from_numpy(layout.source_rows < 0)].any()  # padding
    dw = torch.cat([sum(by_rank[t, c]["dw"] for c in range(cp)) for t in range(tp)])
    return layout.unpad(whole), dw


@pytest.mark.parametrize("tp, cp, sequence_parallel", GRIDS)
def test_packed_sequences(world, tp, cp, sequence_parallel):
    results, want = of(world, "packed", tp, cp, sequence_parallel), packed_truth(LENGTHS, 24, 264)
    assert len(results) == tp * cp
    for r in results:
        assert torch.equal(r["logprob"], results[0]["logprob"]) and torch.equal(r["entropy"], results[0]["entropy"])
        assert within(r["logprob"], want["logprob"], 1e-5) and within(r["entropy"], want["entropy"], 1e-5)
        gathers = {k: v for k, v in r["forward"].items() if k not in ("bytes_sent", "header")}
        assert gathers == {"state": 1, "context": 1} | ({"hidden": 1} if sequence_parallel else {})
        assert "context" not in r["backward"] and "state" not in r["backward"]
    dx, dw = assemble(results, tp, cp, sequence_parallel, LENGTHS)
    assert within(dx, want["dx"], 1e-5) and within(dw, want["dw"], 1e-5)


def test_packed_case_of_skyrl(world):
    tp, cp, sequence_parallel, lengths, hidden, vocab, dtype = SKYRL
    want = packed_truth(lengths, hidden, vocab, dtype)
    results = of(world, "skyrl")
    for r in results:
        assert within(r["logprob"], want["logprob"], 2e-2) and within(r["entropy"], want["entropy"], 2e-2)
    dx, dw = assemble(results, tp, cp, sequence_parallel, lengths)
    assert within(dx, want["dx"], 2e-2) and within(dw, want["dw"], 2e-2)


def test_padded_batch(world):
    for r in of(world, "batch"):
        mask, d = r["mask"], r["data"]
        logits = torch.zeros(*mask.shape, 40, dtype=torch.float64)
        logits[mask.bool()] = d["x"].double() @ d["w"].double().T
        ids = torch.full(mask.shape, 7)
        ids[mask.bool()] = d["ids"]
        want = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        want *= mask[:, :-1] & mask[:, 1:]
        assert r["logprob"].shape == want.shape and within(r["logprob"], want, 1e-5)


@pytest.mark.parametrize("tp", [2, 4])
def test_metric_entropy_changes_no_bit(world, tp):
    for r in of(world, "metric", tp):
        assert all(torch.equal(r["off"][name], r["metric"][name]) for name in ("logprob", "dx", "dw"))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_one_rank_is_an_error_on_every_rank(world, kind):
    messages = processes.checked(world["fault", kind])
    for rank in range(3):
        assert FAULTS[kind] in messages[rank], f"rank {rank}: {messages[rank]}"
    assert all(message.startswith("RuntimeError") for message in (messages[0], messages[2]))


@pytest.mark.parametrize("kind", PACKED_FAULTS)
def test_a_fault_in_a_packed_call_reaches_every_rank(world, kind):
    messages = processes.checked(world["packed fault", kind])
    for rank in range(4):
        assert PACKED_FAULTS[kind] in messages[rank], f"rank {rank}: {messages[rank]}"


def test_a_dead_rank_is_an_error_within_the_timeout():
    [messages] = processes.run(3, [(cases.dead_rank, ())], dead=(1,))
    for rank in (0, 2):
        assert messages[rank].startswith("RuntimeError: group: expected all 3 ranks in the header exchange"), messages[rank]


def test_shards_cut_as_torch_chunk_does():
    for vocab in (1, 5, 8, 49155, 50257):
        for ranks in (1, 2, 3, 4, 8):
            sizes = [len(part) for part in torch.arange(vocab).chunk(ranks)]
            sizes += [0] * (ranks - len(sizes))
            shards = [distributed.vocab_shard(vocab, rank, ranks) for rank in range(ranks)]
            assert [size for _, size in shards] == sizes
            assert [start for start, _ in shards] == [sum(sizes[:r]) for r in range(ranks)]


def test_packed_arguments():
    x, w, ids = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected offsets \[S \+ 1\] or a layout, got None"):
        lmhead.packed_logprobs(x, w, ids, None)
    with pytest.raises(ValueError, match=r"hidden: expected 5 rows .* got \[4, 4\]"):
        lmhead.packed_logprobs(x[:4], w, ids, [0, 2, 5])
    with pytest.raises(ValueError, match=r"input_ids: expected \[5\]"):
        lmhead.packed_logprobs(x, w, ids[:4], [0, 2, 5])
    with pytest.raises(ValueError, match="layout: expected tp 1 and cp 1"):
        lmhead.packed_logprobs(x, w, ids, [0, 2, 5], layout=lmhead.PackedLayout((2, 3), tp=2))
    with pytest.raises(ValueError, match=r"loss_mask: expected \[5, ...\], got \[4\]"):
        lmhead.packed_logprobs(x, w, ids, [0, 2, 5], loss_mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="reduce_hidden_grad: expected None or 'sum' without sequence_parallel"):
        lmhead.packed_logprobs(x, w, ids, [0, 2, 5], reduce_hidden_grad="reduce_scatter")
    logprob = lmhead.packed_logprobs(x, w, ids, [0, 2, 5])
    want = torch.log_softmax(x @ w.T, -1)[[0, 2, 3], [1, 3, 4]]
    assert torch.allclose(logprob[[0, 2, 3]], want, atol=1e-5) and not logprob[[1, 4]].any()


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel"), SUPPORT_GRIDS)
def test_candidate_sets_of_packed_sequences(world, tp, cp, sequence_parallel):
    d = cases.support_data(LENGTHS, 6)
    x, w = d["x"].double().requires_grad_(), d["w"].double().requires_grad_()
    targets, last = d["ids"].roll(-1), torch.tensor(LENGTHS).cumsum(0) - 1
    predicts = d["mask"].clone()
    predicts[last] = False
    logits = x @ w.T / d["temperature"].double()[:, None]
    member = torch.zeros(logits.shape, dtype=torch.bool).scatter_add(
        1, d["support"].clamp_min(0).long(), d["support"] >= 0
    )
    valid = member.any(1) & predicts
    lse = torch.where(valid, logits.masked_fill(~member, -torch.inf).logsumexp(1), 0.0)
    logprob = torch.where(valid, logits.gather(1, targets[:, None])[:, 0] - lse, 0.0)
    log_p = torch.where(member & valid[:, None], logits - lse[:, None], 0.0)
    entropy = -(torch.where(member & valid[:, None], log_p.exp(), 0.0) * log_p).sum(1)
    (logprob * d["a"] + entropy * d["g"]).sum().backward()

    results = of(world, "support", tp, cp, sequence_parallel)
    layout = lmhead.PackedLayout(LENGTHS, tp=tp, cp=cp)
    for result in results[: tp * cp]:
        assert within(result["logprob"].double(), logprob.detach(), 1e-5)
        assert within(result["entropy"].double(), entropy.detach(), 1e-5)
    # The grid is context-major: rank = c * tp + t. Hidden: summed over tp (or scattered), then unsharded over cp.
    parts = []
    for c in range(cp):
        ranks = [results[c * tp + t]["dx"] for t in range(tp)]
        parts.append(torch.cat(ranks) if sequence_parallel else sum(ranks))
    assert within(layout.unpad(layout.unshard(torch.cat(parts))).double(), x.grad, 2e-5)
    shards = [sum(results[c * tp + t]["dw"] for c in range(cp)) for t in range(tp)]
    assert within(torch.cat(shards).double(), w.grad, 2e-5)
