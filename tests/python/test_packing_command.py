"""`lmhead pack`: inputs, output, alignment options, plot, errors."""

import json
import os
import pathlib

import command
import pytest

import lmhead

command.path()  # skips the module when the command is not built
LENGTHS = [60, 55, 45, 40, 30, 25, 20, 10, 5]
TABLE = pathlib.Path(__file__).resolve().parents[2] / "shapes" / "lengths.tsv"


def pack(*arguments, **options):
    done = command.run("pack", *arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_input_format(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in LENGTHS) + "\n")
    (tmp_path / "a.tsv").write_text("id\tlength\r\n" + "".join(f"x\t{n}\r\n" for n in LENGTHS))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"length": n, "id": 1}) + "\n" for n in LENGTHS))
    expected = pack("-", "--capacity", 100, input="\n".join(map(str, LENGTHS)))
    assert expected["bins"] == [[0, 3], [1, 2], [4, 5, 6, 7, 8]]
    assert (expected["lower_bound"], expected["num_bins"], expected["tokens"]) == (3, 3, 290)
    for name in ("a.txt", "a.tsv", "a.jsonl"):
        assert pack(tmp_path / name, "--capacity", 100) == expected


def test_alignment_and_bin_counts():
    text = "17\n15\n9\n"
    result = pack("-", "--capacity", 32, "--tp", 4, "--cp", 2, "--dp", 2, "--allow-empty", input=text)
    assert (result["sequence_multiple"], result["total_multiple"]) == (16, 16)
    assert result["bins"] == lmhead.pack(
        [17, 15, 9], 32, sequence_multiple=16, total_multiple=16, bin_multiple=2, allow_empty=True
    )
    assert pack("-", "--capacity", 512, "--tp", 4, "--fp8", input=text)["footprint"] == 512
    assert pack("-", "--capacity", 64, "--precision", "mxfp8", input=text)["total_multiple"] == 32
    assert pack("-", "--capacity", 64, "--sequence-multiple", 8, "--algorithm", "FFD", input=text)["sequence_multiple"] == 8
    assert pack("-", "--capacity", 10, "--truncate", input=text)["tokens"] == 29
    assert pack("-", "--capacity", 10, "--allow-oversize", input=text)["num_bins"] == 3


def test_quantiles_are_seeded():
    options = ("--quantiles", TABLE, "--set", "gsm8k_train", "--count", 2000, "--capacity", 2048)
    first = pack(*options, "--seed", 1)
    assert first == pack(*options, "--seed", 1) != pack(*options, "--seed", 2)
    assert abs(first["tokens"] / 2000 - 150.5) < 8, "the table's mean"


def test_text_and_plot(tmp_path):
    for count in (len(LENGTHS), 2000):
        plot = tmp_path / f"{count}.svg"
        done = command.run("pack", "-", "--capacity", 100, "--dp", 3, "--plot", plot, input="\n".join(map(str, (LENGTHS * 300)[:count])))
        assert done.returncode == 0 and "lower bound   " in done.stdout and "per rank" in done.stdout
        assert plot.read_text().startswith("<svg") and plot.read_text().endswith("</svg>\n")
    assert list(tmp_path.iterdir()) and not list(tmp_path.glob("*.tmp*"))


DRAW = ("--quantiles", str(TABLE), "--set", "gsm8k_train", "--count", "3")


@pytest.mark.parametrize(
    "arguments, text, message",
    [
        (["-"], "3\nx\n", "stdin:2: expected an integer length, got \"x\""),
        (["-"], "3\n0\n", "lengths[1]: expected an integer >= 1, got 0"),
        (["-"], "101\n", "footprint <= capacity 100 (or allow_oversize), got length 101"),
        (["-", "--dp", "4"], "1\n1\n", "Cannot create 4 bins with only 2 sequences"),
        (["-", "--algorithm", "magic"], "1\n", "Unknown packing algorithm"),
        (["-", "--precision", "auto"], "1\n", "precision: expected none, fp8 or mxfp8"),
        (["-", "--tp", "0"], "1\n", "tp: expected an integer >= 1, got 0"),
        ([], "", "LENGTHS: expected either a file of lengths or --quantiles"),
        (["missing.txt"], "", "missing.txt: cannot be read"),
        (["lengths.csv"], "", "LENGTHS: expected a .txt, .tsv or .jsonl file"),
        (["--quantiles", str(TABLE), "--set", "none", "--count", "3"], "", "--set: expected one of gsm8k_train"),
        (["--set", "none"], "", "requires"),
        (["-", "--tp", str(2**64 + 1)], "1\n", f"--tp: expected an integer within 64 bits, got {2**64 + 1}"),
        (["-", "--min-bins", str(-(2**63) - 1)], "1\n", "--min-bins: expected an integer within 64 bits"),
        ([*DRAW, "--seed", "-1"], "", "--seed: expected an integer >= 0, got -1"),
        ([*DRAW, "--seed", str(2**64)], "", "--seed: expected an integer within 64 bits"),
        (["-", "--fp8", "--precision", "fp8"], "1\n", "excludes"),
    ],
)
def test_errors(arguments, text, message):
    done = command.run("pack", *arguments, "--capacity", 100, input=text)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_broken_files(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    done = command.run("pack", tmp_path / "folder.txt", "--capacity", 100)
    assert done.returncode == 2 and done.stderr.endswith("folder.txt: cannot be read\n")
    for name, text, message in [
        ("a.tsv", "id\tsize\n1\t2\n", "a.tsv:1: expected a column \"length\", got id, size"),
        ("a.tsv", "id\tlength\n1\n", "a.tsv:2: expected 2 fields, got 1"),
        ("a.tsv", "", "a.tsv:0: expected a header"),
        ("a.jsonl", '{"length": 3}\n{"length": 3.5}\n', "a.jsonl:2: expected an object with an integer"),
        ("a.jsonl", "{\n", "a.jsonl:1: expected an object"),
        ("a.jsonl", '{"length": 18446744073709551615}\n', "a.jsonl:1: expected an object with an integer"),
    ]:
        (tmp_path / name).write_text(text)
        done = command.run("pack", tmp_path / name, "--capacity", 100)
        assert done.returncode == 2 and message in done.stderr


def test_a_plot_may_not_replace_the_lengths(tmp_path):
    lengths = tmp_path / "a.txt"
    lengths.write_text("3\n")
    done = command.run("pack", lengths, "--capacity", 100, "--plot", f"{tmp_path}/./a.txt")
    assert done.returncode == 2 and "expected an output file other than the lengths" in done.stderr
    assert lengths.read_text() == "3\n" and list(tmp_path.iterdir()) == [lengths]


def test_a_closed_stdin_is_not_an_empty_list():
    done = command.run("pack", "-", "--capacity", 100, preexec_fn=lambda: os.close(0))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "lmhead: stdin: read error\n")
