"""lmhead score on broken input: one line that names the fault, the right exit code, no output file."""

import json
import os
import pty
import signal
import subprocess
import time

import command
import numpy as np
import pytest
import safetensors_file as st

N, H, V = 9, 8, 50
COMMANDS = [command.path()]
if "LMHEAD_ASAN_COMMAND" in os.environ:
    COMMANDS.append(command.path("LMHEAD_ASAN_COMMAND"))


def good():
    r = np.random.default_rng(6)
    return (
        dict(hidden=r.standard_normal((N, H)).astype(np.float32), input_ids=r.integers(0, V, N), cu_seqlens=np.array([0, 4, N])),
        {"lm_head.weight": r.standard_normal((V, H)).astype(np.float32)},
    )


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def batch_with(**tensors):
    """Good bytes with tensors replaced, or left out where None."""
    merged = good()[0] | tensors
    return st.pack(*st.entries({name: t for name, t in merged.items() if t is not None}))


def model_with(**tensors):
    return st.pack(*st.entries({name.replace("__", "."): t for name, t in tensors.items()}))


def header_with(edit):
    """Good batch bytes after `edit` changed the header dict (or returned another header)."""
    header, data = st.entries(good()[0])
    return st.pack(edit(header) or header, data)


def entry(**fields):
    def edit(header):
        header["hidden"] |= fields

    return header_with(edit)


BATCH, HEAD = good()
X, W, IDS = BATCH["hidden"], HEAD["lm_head.weight"], BATCH["input_ids"]
RAW = batch_with()
DATA_BYTES = X.nbytes + IDS.nbytes + 3 * 8

BATCH_FAULTS = {
    "empty": (b"", "expected at least 8 bytes, got 0"),
    "not safetensors": (b"PK\x03\x04 zip file, certainly not this", "expected a header of at most"),
    "header cut": (RAW[:40], "truncated: expected a header of"),
    "data cut": (RAW[:-1], "the file is truncated"),
    "trailing bytes": (RAW + b"\0", f"expected {DATA_BYTES} bytes of data as its header says, got {DATA_BYTES + 1}"),
    "header too large": (b"\xff\xff\xff\xff\0\0\0\0" + RAW[8:], "expected a header of at most 100000000 bytes"),
    "header length wraps": (b"\xff" * 8 + RAW[8:], "expected a header of at most"),
    "header not JSON": (st.pack("{hidden", b""), "its header is not JSON"),
    "header not UTF-8": (b"\x04\0\0\0\0\0\0\0" + b'{"\xff}', "its header is not JSON"),
    "header a list": (st.pack("[]", b""), "expected a JSON object"),
    "name twice": (st.pack('{"a": {}, "a": {}}', b""), 'names "a" twice'),
    "entry without dtype": (header_with(lambda h: h["hidden"].pop("dtype") and None), "hidden: header entry: expected dtype"),
    "negative size": (entry(shape=[-9, -8]), "hidden: header entry"),
    "fractional size": (entry(shape=[9.5, 8]), "hidden: header entry"),
    "huge size": (entry(shape=[2**62, 2**62, 2**62]), "hidden: shape: expected a size below 2^64 bytes"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), "hidden: header entry"),
    "offsets reversed": (entry(data_offsets=[8, 0]), "expected begin <= end, got [8, 0]"),
    "offset out of range": (entry(data_offsets=[0, 2**40]), "the file is truncated"),
    "size against offsets": (entry(shape=[N, H + 1]), f"expected {N * (H + 1) * 4} bytes for F32 [{N}, {H + 1}], got {N * H * 4}"),
    "overlap": (
        header_with(lambda h: h["input_ids"].update(data_offsets=[0, IDS.nbytes])),
        "data_offsets: expected a begin at",
    ),
    "no hidden": (batch_with(hidden=None), "no tensor hidden"),
    "no ids": (batch_with(input_ids=None), "expected either targets or input_ids, got neither"),
    "both ids": (batch_with(targets=IDS), "expected either targets or input_ids, got both"),
    "hidden dtype": (batch_with(hidden=X.astype(np.float64)), "hidden: expected F32 or BF16 or F16, got F64"),
    "hidden integer": (batch_with(hidden=X.astype(np.int32)), "hidden: expected F32 or BF16 or F16, got I32"),
    "hidden unknown dtype": (entry(dtype="F4"), "hidden: expected F32 or BF16 or F16, got F4"),
    "hidden rank": (batch_with(hidden=X[0]), "hidden: expected [N, H] with H >= 1, got [8]"),
    "hidden width 0": (batch_with(hidden=X[:, :0]), "hidden: expected [N, H] with H >= 1, got [9, 0]"),
    "hidden width": (batch_with(hidden=X[:, :5]), "hidden: expected [N, 8] to match lm_head.weight [50, 8], got [9, 5]"),
    "hidden NaN": (batch_with(hidden=changed(X, (7, 3), np.nan)), "hidden: expected finite values, got nan at [7, 3]"),
    "hidden infinite": (batch_with(hidden=changed(X, (0, 0), -np.inf)), "hidden: expected finite values, got inf at [0, 0]"),
    "hidden bf16 NaN": (
        batch_with(hidden=(changed(st.bf16_bits(X), (8, 7), 0xFFC0), "BF16")),
        "hidden: expected finite values, got nan at [8, 7]",
    ),
    "hidden fp16 infinite": (
        batch_with(hidden=changed(X, (2, 1), np.inf).astype(np.float16)),
        "hidden: expected finite values, got inf at [2, 1]",
    ),
    "ids dtype": (batch_with(input_ids=IDS.astype(np.float32)), "input_ids: expected I64 or I32, got F32"),
    "ids size": (batch_with(input_ids=IDS[:-1]), "input_ids: expected [9], got [8]"),
    "ids rank": (batch_with(input_ids=IDS[:, None]), "input_ids: expected [9], got [9, 1]"),
    "id too large": (batch_with(input_ids=changed(IDS, 6, V)), "input_ids: expected ids in [0, 50), got 50 at row 6"),
    "id negative": (batch_with(input_ids=changed(IDS, 6, -100)), "input_ids: expected ids >= 0, got -100 at row 6"),
    "target too large": (
        batch_with(input_ids=None, targets=changed(IDS, 2, 1 << 40)),
        "targets: expected ids in [0, 50) or -100, got 1099511627776 at row 2",
    ),
    "target negative": (batch_with(input_ids=None, targets=changed(IDS, 2, -1)), "targets: expected ids in [0, 50) or -100"),
    "cu_seqlens start": (batch_with(cu_seqlens=np.array([1, N])), "cu_seqlens: expected 0 first, got 1"),
    "cu_seqlens empty": (batch_with(cu_seqlens=np.zeros(0, np.int64)), "cu_seqlens: expected 0 first, got nothing"),
    "cu_seqlens end": (batch_with(cu_seqlens=np.array([0, N + 1])), "cu_seqlens: expected 9 (the rows of hidden) last, got 10"),
    "cu_seqlens order": (batch_with(cu_seqlens=np.array([0, 5, 4, N])), "cu_seqlens: expected values that do not decrease"),
    "cu_seqlens rank": (batch_with(cu_seqlens=np.array([[0, N]])), "cu_seqlens: expected [S + 1], got [1, 2]"),
    "mask dtype": (batch_with(loss_mask=np.ones(N, np.float32)), "loss_mask: expected BOOL or"),
    "mask size": (batch_with(loss_mask=np.ones(N + 1, bool)), "loss_mask: expected [9], got [10]"),
}
MODEL_FAULTS = {
    "no head": (model_with(other=W), "no lm_head.weight and no embed_tokens.weight; it has other"),
    "two heads": (model_with(a__lm_head__weight=W, b__lm_head__weight=W), "choose one with --tensor"),
    "weight dtype": (model_with(lm_head__weight=W.astype(np.int8)), "lm_head.weight: expected F32 or BF16 or F16, got I8"),
    "weight rank": (model_with(lm_head__weight=W[0]), "lm_head.weight: expected [V, H], got [8]"),
    "weight NaN": (model_with(lm_head__weight=changed(W, (49, 7), np.nan)), "lm_head.weight: expected finite values, got nan at [49, 7]"),
    "bias size": (model_with(lm_head__weight=W, lm_head__bias=np.zeros(3, np.float32)), "lm_head.bias: expected [50], got [3]"),
    "truncated": (st.pack(*st.entries(HEAD))[:-4], "the file is truncated"),
}


def check(tmp_path, message, *flags, code=2, binary=None, outputs=("scores.safetensors", "report.html")):
    before = sorted(tmp_path.rglob("*"))
    done = command.run(
        "score", tmp_path / "batch.safetensors", "--model", tmp_path / "model.safetensors", "--json",
        "--out", tmp_path / outputs[0], "--html", tmp_path / outputs[1], *flags, command=binary,
    )  # fmt: skip
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lmhead: ") and message in lines[0], done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(params=COMMANDS)
def binary(request):
    return request.param


@pytest.fixture
def files(tmp_path):
    (tmp_path / "batch.safetensors").write_bytes(RAW)
    st.write(tmp_path / "model.safetensors", HEAD)
    return tmp_path


@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_broken_batch(files, fault, binary):
    content, message = BATCH_FAULTS[fault]
    (files / "batch.safetensors").write_bytes(content)
    check(files, message, binary=binary)


def test_a_model_whose_name_no_file_can_have(files, binary):
    done = command.run("score", files / "batch.safetensors", "--model", "m" * 300, command=binary)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"lmhead: {'m' * 300}: File name too long\n")


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_broken_model(files, fault, binary):
    content, message = MODEL_FAULTS[fault]
    (files / "model.safetensors").write_bytes(content)
    check(files, message, binary=binary)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tensor", "nothing"], "no tensor nothing; it has lm_head.weight"),
        (["--temperature", "0"], "--temperature: expected a finite number > 0, got 0"),
        (["--temperature", "nan"], "--temperature: expected a finite number > 0, got nan"),
        (["--temperature", "warm"], "--temperature: expected a finite number > 0, got warm"),
        (["--softcap", "-3"], "--softcap: expected a finite number > 0, or 0 for none, got -3"),
        (["--logit-scale", "inf"], "--logit-scale: expected a finite number, got inf"),
        (["--valid-vocab", "51"], "--valid-vocab: expected in [1, 50], got 51"),
        (["--valid-vocab", "1"], "input_ids: expected ids in [0, 1)"),
        (["--backend", "nothing"], "--backend: expected one of auto, cuda, "),
        (["--threads", "-1"], "--threads: expected an integer in [0, 2147483647], got -1"),
        (["--json=xml"], "--json"),
        (["--colour"], "--colour"),
    ],
)
def test_bad_options(files, flags, message):
    check(files, message, *flags)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[", "expected a JSON list of strings"),
        ("{}", "expected a list of 9 strings (the rows of hidden), got object"),
        ('["a"]', "expected a list of 9 strings (the rows of hidden), got 1"),
        ('["a", 1, "", "", "", "", "", "", ""]', "expected strings, got 1 at 1"),
        (None, "tokens.json: cannot read it"),
    ],
)
def test_bad_tokens(files, content, message):
    if content is None:
        (files / "tokens.json").mkdir()
    else:
        (files / "tokens.json").write_text(content)
    check(files, message, "--tokens", files / "tokens.json")


@pytest.mark.parametrize("what", ["no index map", "path in index", "missing shard", "tensor not in shard", "not tied", "bad config"])
def test_broken_folder(tmp_path, what):
    (tmp_path / "batch.safetensors").write_bytes(RAW)
    folder = tmp_path / "model"
    folder.mkdir()
    shard, index = folder / "model-1.safetensors", {"weight_map": {"lm_head.weight": "model-1.safetensors"}}
    st.write(shard, HEAD)
    message = {"no index map": "expected an object weight_map", "missing shard": "No such file"}.get(what)
    if what == "no index map":
        index = {}
    elif what == "path in index":
        index["weight_map"]["lm_head.weight"], message = "../model-1.safetensors", "expected a file name, got"
    elif what == "missing shard":
        shard.unlink()
    elif what == "tensor not in shard":
        st.write(shard, {"other": W})
        message = "no tensor lm_head.weight, which the index places there"
    elif what == "not tied":
        index["weight_map"] = {"model.embed_tokens.weight": "model-1.safetensors"}
        (folder / "config.json").write_text('{"tie_word_embeddings": false}')
        message = "tie_word_embeddings is false"
    elif what == "bad config":
        (folder / "config.json").write_text('{"final_logit_softcapping": "30"}')
        message = "final_logit_softcapping: expected a number"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = command.run("score", tmp_path / "batch.safetensors", "--model", folder, "--out", tmp_path / "scores")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "scores").exists()


def test_missing_files(tmp_path, files):
    done = command.run("score", tmp_path / "nowhere", "--model", files / "model.safetensors")
    assert done.returncode == 2 and "nowhere: No such file" in done.stderr
    done = command.run("score", files / "batch.safetensors", "--model", tmp_path / "nowhere")
    assert done.returncode == 2 and "nowhere: no such file or folder" in done.stderr
    done = command.run("score", tmp_path, "--model", files / "model.safetensors")
    assert done.returncode == 2 and "expected a regular file" in done.stderr
    assert command.run("score").returncode == 2
    assert command.run().returncode == 2
    assert command.run("scores").stderr.startswith("lmhead: expected one of score, bench, ")
    assert command.run("--help").returncode == 0


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("score", "--help"), ("info",)])
def test_a_full_stdout_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([command.path(), *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == "lmhead: stdout: cannot write to it\n"


def test_unwritable_outputs(files):
    check(files, "cannot write: No such file", outputs=("no/such/folder/scores", "report.html"))
    check(files, "expected a file other than that of --out", outputs=("same", "same"))
    check(files, "expected an output file other than the batch", outputs=("batch.safetensors", "report.html"))
    check(files, "expected a regular file or none to write to", outputs=("/dev/null", "report.html"))
    check(files, "--html: expected a file other than that of --out", outputs=("same", "./same"))
    done = command.run("score", files / "batch.safetensors", "--model", files / "model.safetensors", "--out", "")
    assert done.returncode == 2 and "--out: expected a value, got nothing" in done.stderr


def test_inputs_are_never_replaced(files):
    """A rename onto the weights would leave the user without them."""
    model = files / "model.safetensors"
    (files / "tokens.json").write_text(json.dumps(["a"] * N))
    inputs = {p: p.read_bytes() for p in files.iterdir()}
    check(files, "expected an output file other than the model", outputs=("model.safetensors", "report.html"))
    tokens = ("--tokens", files / "tokens.json")
    check(files, "expected an output file other than --tokens", *tokens, outputs=("scores", "tokens.json"))
    done = command.run("score", files / "batch.safetensors", "--model", files, "--out", model)
    assert done.returncode == 2  # two .safetensors files: no model folder
    (files / "folder").mkdir()
    inside = files / "folder" / "model.safetensors"
    os.link(model, inside)
    done = command.run("score", files / "batch.safetensors", "--model", files / "folder", "--out", inside)
    assert done.returncode == 2 and "expected an output file other than the model" in done.stderr
    assert {p: p.read_bytes() for p in inputs} == inputs


def test_closed_streams_do_not_end_up_in_files(files):
    """Without a stderr its number would go to the next file that is opened."""
    batch, model, out = files / "batch.safetensors", files / "model.safetensors", files / "scores.safetensors"
    st.write(batch, BATCH | dict(extra=IDS))  # a note on stderr
    assert command.run("score", batch, "--model", model, "--out", out).stderr.startswith("lmhead: note: ")
    want = out.read_bytes()
    out.unlink()
    done = command.run("score", batch, "--model", model, "--out", out, preexec_fn=lambda: (os.close(0), os.close(2)))
    assert done.returncode == 0 and out.read_bytes() == want
    done = command.run("score", batch, "--model", model, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1 and "stdout: cannot write to it" in done.stderr


def test_overflow_is_not_a_score(files):
    st.write(files / "batch.safetensors", BATCH | dict(hidden=np.full((N, H), 3e38, np.float32)))
    st.write(files / "model.safetensors", {"lm_head.weight": np.full((V, H), 3e38, np.float32)})
    check(files, "row 0: its logits overflow fp32", code=1)


def test_failure_keeps_the_old_file(files):
    for name in ("scores.safetensors", "report.html"):
        (files / name).write_bytes(b"old")
    (files / "batch.safetensors").write_bytes(batch_with(hidden=changed(X, (7, 3), np.nan)))
    check(files, "got nan at [7, 3]")
    assert (files / "scores.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupt_leaves_nothing(tmp_path, number, code):
    r = np.random.default_rng(7)
    n, h, v = 4096, 512, 20000
    st.write(tmp_path / "batch.safetensors", dict(hidden=r.standard_normal((n, h), np.float32), targets=np.zeros(n, np.int64)))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": r.standard_normal((v, h), np.float32)})
    arguments = ["score", tmp_path / "batch.safetensors", "--model", tmp_path / "model.safetensors"]
    arguments += ["--backend", "reference", "--out", tmp_path / "scores.safetensors", "--html", tmp_path / "report.html"]
    process = subprocess.Popen(
        [COMMANDS[0], *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background inherits it ignored
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.tmp"))) < 2:  # both outputs are open: the scoring has begun
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch.safetensors", "model.safetensors"]
    assert process.stdout.read() == b""


def test_progress_only_on_a_terminal(files):
    arguments = ["score", str(files / "batch.safetensors"), "--model", str(files / "model.safetensors"), "--json"]
    master, terminal = pty.openpty()
    done = subprocess.run([COMMANDS[0], *arguments], stdout=subprocess.PIPE, stderr=terminal, timeout=60)
    os.close(terminal)
    assert done.returncode == 0 and b"scoring" in os.read(master, 4096)
    os.close(master)
    assert command.run(*arguments).stderr == ""
