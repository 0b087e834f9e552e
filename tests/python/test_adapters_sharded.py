"""Adapters over tensor- and context-parallel gloo groups, against their hosts or the whole head."""

import adapter_cases as cases
import hosts
import pytest
import ranks as processes
from plain import largest

CASES = {
    "skyrl packed, tp 2, cp 2": (cases.skyrl_packed, (2, 2)),
    "skyrl packed, tp 1, cp 4": (cases.skyrl_packed, (1, 4)),
    "skyrl padded, tp 4": (cases.skyrl_padded, (4,)),
    "verl, tp 2": (cases.verl_sharded, (2,)),
    "megatron, tp 4": (cases.megatron_layer, (4, False)),
    "megatron, tp 2, sequence parallel": (cases.megatron_layer, (2, True)),
}


@pytest.fixture(scope="module")
def world():
    """Every case on one set of four processes."""
    hosts.skyrl()  # installs it, or skips, before the ranks need it
    return dict(zip(CASES, processes.run(4, list(CASES.values())), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_rank_agrees(world, case):
    for rank, result in enumerate(processes.checked(world[case])):
        for name, (got, want) in result.items():
            assert got.shape == want.shape and largest(got, want) <= 1e-5, f"{name} on rank {rank}"
        assert largest(result["logprob"][0], world[case][0]["logprob"][0]) == 0  # the same bits everywhere
