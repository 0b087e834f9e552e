"""`lmhead bench`: what a record says of the shape that ran, and what it refuses. Times are not held to anything."""

import json
import re

import command
import pytest


def records(*arguments):
    done = command.run("bench", "--json", "--hidden", 64, "--vocab", 4096, "--tokens", 256, "--reps", 1, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (1, 2), (2, 4)])
def test_a_shard_runs_at_its_local_shape(tp, cp):
    (record,) = records("--tp", tp, "--cp", cp)
    assert (record["n"], record["h"], record["v"]) == (256 // cp, 64, 4096 // tp)
    assert f"--tp {tp} --cp {cp}" in record["command"] and record["ms"] > 0 and record["units"] > 0


def test_masks_and_entropies_take_turns_with_what_they_are_compared_with():
    rows = records("--op", "forward,forward_backward", "--entropy", "off,grad", "--active", "1,0.5", "--pattern",
                   "suffix,scattered")  # fmt: skip
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row["active"] == (1 if row["pattern"] == "dense" else 0.5)
        assert (row["of_dense"] is None) == (row["pattern"] == "dense")
        assert (row["of_entropy_off"] is None) == (row["entropy"] == "off")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cp", 3), "--cp: expected a divisor of --tokens 256, got 3"),
        (("--tp", 3), "--tp: expected a divisor of the vocabulary 4096, got 3"),
        (("--backend", "tpu"), "--backend: expected one of"),
        (("--active", 1.5), "--active: expected a number in [0, 1], got 1.5"),
        (("--active", "1,nan"), "--active: expected a number in [0, 1], got nan"),
        (("--workspace-mib", "nan"), "--workspace-mib: expected a number in [0, 1099511627776], got nan"),
        (("--reps", 0), "--reps: expected an integer in [1, 2147483647], got 0"),
        (("--threads", 1 << 31), "--threads: expected an integer in [0, 2147483647], got 2147483648"),
        (("--head", "gpt2"), "--head: expected a name, or --hidden and --vocab, and not both"),
    ],
)
def test_bad_arguments(arguments, message):
    done = command.run("bench", "--hidden", 64, "--vocab", 4096, "--tokens", 256, *arguments)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("subcommand", "option", "default"),
    [
        ("bench", "--op", "=forward "),
        ("bench", "--entropy", "=metric "),
        ("bench", "--active", "=1 "),
        ("bench", "--pattern", "=suffix "),
        ("bench", "--tp", "=1 "),
        ("tune", "--tp", "=1 "),
        ("tune", "--tokens", "2048,8192,16384,32768 on a GPU, 512,2048 on a CPU"),
    ],
)
def test_help_names_defaults(subcommand, option, default):
    entry = re.search(rf"  {option} .*?(?=\n  -|\Z)", command.run(subcommand, "--help").stdout, re.S)[0]
    # Of CLI11's versions some write =VALUE, others [VALUE].
    assert default in " ".join(entry.split()).replace("[", "=").replace("]", ""), entry


def test_defaults_are_those_that_help_names():
    assert [(r["op"], r["entropy"], r["active"], r["pattern"]) for r in records()] == [("forward", "metric", 1, "dense")]
    assert [r["pattern"] for r in records("--active", 0.5)] == ["suffix"]
