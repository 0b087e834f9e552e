"""lmhead score: numbers, formats and models that it accepts. Broken input: test_score_errors.py."""

import json

import command
import numpy as np
import pytest
import safetensors_file as st

N, H, V = 37, 24, 301
COMMAND = command.path()


def floats(r, shape, dtype, std=1.0):
    """Random values: as stored in a file, and as fp64."""
    values = (std * r.standard_normal(shape)).astype(np.float32)
    if dtype == "BF16":
        bits = st.bf16_bits(values)
        return (bits, "BF16"), st.bf16_values(bits).astype(np.float64)
    values = values.astype(np.float16 if dtype == "F16" else np.float32)
    return values, values.astype(np.float64)


def exact(hidden, weight, targets, temperature=1.0, softcap=None, scale=1.0, bias=0.0):
    """fp64 logprob and entropy; 0 where the target is -100."""
    z = scale * (hidden @ weight.T + bias)
    z = (softcap * np.tanh(z / softcap) if softcap else z) / temperature
    z -= z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    scored = targets != -100
    logprob = np.take_along_axis(log_p, np.where(scored, targets, 0)[:, None], -1)[:, 0]
    return np.where(scored, logprob, 0), np.where(scored, -(np.exp(log_p) * log_p).sum(-1), 0)


def score(tmp_path, *arguments, batch="batch.safetensors", model="model.safetensors"):
    """Scores and entropies of a run that must succeed, and its JSON lines."""
    out = tmp_path / "scores.safetensors"
    done = command.run(
        "score", tmp_path / batch, "--model", tmp_path / model, "--entropy", "--json=tokens", "--out", out, *arguments
    )
    assert done.returncode == 0, done.stderr
    scores, _ = st.read(out)
    return scores["logprob"], scores["entropy"], [json.loads(line) for line in done.stdout.splitlines()]


def assert_close(got, want):
    assert got.dtype == np.float32 and got.shape == want.shape
    assert (np.abs(got - want) <= 2e-5).all(), np.abs(got - want).max()


@pytest.fixture
def problem():
    r = np.random.default_rng(3)
    hidden, x = floats(r, (N, H), "F32")
    weight, w = floats(r, (V, H), "F32", 1.5 / H**0.5 * 2)
    return dict(hidden=hidden, x=x, weight=weight, w=w, ids=r.integers(0, V, N, np.int64))


@pytest.mark.parametrize("weight_dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_targets_of_every_dtype(tmp_path, weight_dtype, ids_dtype):
    r = np.random.default_rng(4)
    hidden, x = floats(r, (N, H), weight_dtype)
    weight, w = floats(r, (V, H), weight_dtype, 0.6)
    targets = r.integers(0, V, N).astype(ids_dtype)
    targets[[3, N - 1]] = -100
    st.write(tmp_path / "batch.safetensors", dict(hidden=hidden, targets=targets))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": weight})
    logprob, entropy, lines = score(tmp_path)
    want_logprob, want_entropy = exact(x, w, targets)
    assert_close(logprob, want_logprob)
    assert_close(entropy, want_entropy)
    assert lines[-1]["scored"] == N - 2 and lines[3]["target"] is None


def test_packed_sequences_and_mask(tmp_path, problem):
    cu = np.array([0, 10, 10, 11, N], np.int32)  # an empty sequence and one of a single token too
    mask = np.arange(N) % 3 != 1
    st.write(
        tmp_path / "batch.safetensors",
        dict(hidden=problem["hidden"], input_ids=problem["ids"], cu_seqlens=cu, loss_mask=mask),
    )
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": problem["weight"]})
    targets = np.append(problem["ids"][1:], -100)
    targets[[9, 10]] = -100
    targets[~mask] = -100
    want_logprob, want_entropy = exact(problem["x"], problem["w"], targets)
    logprob, entropy, lines = score(tmp_path)
    assert_close(logprob, want_logprob)
    assert_close(entropy, want_entropy)

    tokens = [line for line in lines if line["type"] == "token"]
    assert [t["row"] for t in tokens] == list(range(N))
    assert [t["sequence"] for t in tokens] == [0] * 10 + [2] + [3] * (N - 11)
    assert [t["target"] for t in tokens] == [None if t == -100 else t for t in targets]
    assert np.array_equal(np.float32([t["logprob"] for t in tokens]), logprob)
    sequences = [line for line in lines if line["type"] == "sequence"]
    assert [s["rows"] for s in sequences] == [10, 0, 1, N - 11]
    first = targets[:10] != -100
    assert sequences[0]["mean_logprob"] == pytest.approx(logprob[:10][first].mean(), rel=1e-6)
    assert sequences[1]["mean_logprob"] is None
    summary = lines[-1]
    assert summary["type"] == "summary" and summary["scored"] == (targets != -100).sum()
    assert summary["mean_entropy"] == pytest.approx(entropy[targets != -100].mean(), rel=1e-6)
    assert summary["perplexity"] == pytest.approx(np.exp(-logprob[targets != -100].mean(dtype=np.float64)), rel=1e-6)


@pytest.mark.parametrize(
    "flags, options",
    [
        (["--temperature", "0.7"], dict(temperature=0.7)),
        (["--softcap", "2.5"], dict(softcap=2.5)),
        (["--softcap", "0"], {}),
        (["--logit-scale", "0.25", "--temperature", "2"], dict(scale=0.25, temperature=2)),
        (["--backend", "reference", "--threads", "1"], {}),
    ],
)
def test_options(tmp_path, problem, flags, options):
    st.write(tmp_path / "batch.safetensors", dict(hidden=problem["hidden"], targets=problem["ids"]))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": problem["weight"]})
    logprob, entropy, lines = score(tmp_path, *flags)
    want_logprob, want_entropy = exact(problem["x"], problem["w"], problem["ids"], **options)
    assert_close(logprob, want_logprob)
    assert_close(entropy, want_entropy)
    if "--backend" in flags:
        assert lines[-1]["backend"] == "reference" and lines[-1]["threads"] == 1


def test_valid_vocab_leaves_padding_alone(tmp_path, problem):
    weight = problem["weight"].copy()
    weight[V - 7 :] = np.nan
    ids = problem["ids"] % (V - 7)
    st.write(tmp_path / "batch.safetensors", dict(hidden=problem["hidden"], targets=ids))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": weight})
    logprob, _, _ = score(tmp_path, "--valid-vocab", V - 7)
    assert_close(logprob, exact(problem["x"], problem["w"][: V - 7], ids)[0])


def hugging_face(folder, tensors, shards=1, config=None):
    """Writes a model folder: one file, or an index with `shards` files."""
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        st.write(folder / "model.safetensors", tensors)
        return folder
    places = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        places[name] = f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
    for shard in sorted(set(places.values())):
        st.write(folder / shard, {n: t for n, t in tensors.items() if places[n] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "names, config, flags, options",
    [
        (["lm_head.weight", "model.embed_tokens.weight"], {"tie_word_embeddings": False}, [], {}),
        (["lm_head.weight", "model.embed_tokens.weight", "lm_head.bias"], {}, [], dict(bias=True)),
        (["model.embed_tokens.weight"], None, [], {}),
        (["model.embed_tokens.weight"], {"final_logit_softcapping": 3.0}, [], dict(softcap=3.0)),
        (["model.embed_tokens.weight"], {"final_logit_softcapping": None, "logit_scale": 0.5}, [], dict(scale=0.5)),
        (["model.embed_tokens.weight"], {"logits_scaling": 4.0}, [], dict(scale=0.25)),
        (["model.embed_tokens.weight"], {"logits_scaling": 4.0}, ["--logit-scale", "1"], {}),
        (["language_model.lm_head.weight"], {"text_config": {"final_logit_softcapping": 3.0}}, [], dict(softcap=3.0)),
        (["my.head"], {}, ["--tensor", "my.head"], {}),
    ],
)
def test_model_folders(tmp_path, problem, shards, names, config, flags, options):
    r = np.random.default_rng(5)
    bias = r.standard_normal(V).astype(np.float32)
    decoy = r.standard_normal((V, H)).astype(np.float32)
    tensors = {"model.layers.0.mlp.up_proj.weight": decoy}
    tensors |= {name: bias if name.endswith("bias") else decoy for name in names}
    tensors[names[0]] = problem["weight"]
    hugging_face(tmp_path / "model", tensors, shards, config)
    st.write(tmp_path / "batch.safetensors", dict(hidden=problem["hidden"], targets=problem["ids"]))
    logprob, _, lines = score(tmp_path, *flags, model="model")
    options = options | (dict(bias=bias.astype(np.float64)) if "bias" in options else {})
    assert_close(logprob, exact(problem["x"], problem["w"], problem["ids"], **options)[0])
    assert lines[-1]["tensor"] == names[0]


def test_misaligned_tensors(tmp_path, problem):
    padding = np.zeros(1, np.int8)
    st.write(
        tmp_path / "batch.safetensors", dict(aaa=padding, hidden=problem["hidden"], bbb=padding, targets=problem["ids"])
    )
    st.write(tmp_path / "model.safetensors", {"aaa": padding, "lm_head.weight": problem["weight"]})
    assert_close(score(tmp_path)[0], exact(problem["x"], problem["w"], problem["ids"])[0])


def test_no_rows(tmp_path, problem):
    st.write(tmp_path / "batch.safetensors", dict(hidden=np.zeros((0, H), np.float32), targets=np.zeros(0, np.int64)))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": problem["weight"]})
    logprob, entropy, lines = score(tmp_path)
    assert logprob.shape == entropy.shape == (0,) and lines[-1]["mean_logprob"] is None


def test_output_without_entropy(tmp_path, problem):
    st.write(tmp_path / "batch.safetensors", dict(hidden=problem["hidden"], targets=problem["ids"], extra=problem["ids"]))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": problem["weight"]})
    out = tmp_path / "scores.safetensors"
    done = command.run("score", tmp_path / "batch.safetensors", "--model", tmp_path / "model.safetensors", "--out", out)
    assert done.returncode == 0 and "mean logprob" in done.stdout
    assert "not read: extra" in done.stderr  # said, not silently left out
    scores, metadata = st.read(out)
    assert set(scores) == {"logprob"} and metadata["tensor"] == "lm_head.weight"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch.safetensors", "model.safetensors", "scores.safetensors"]


def test_safetensors_package_reads_the_scores(tmp_path, problem):
    numpy_reader = pytest.importorskip("safetensors.numpy")
    st.write(tmp_path / "batch.safetensors", dict(hidden=problem["hidden"], targets=problem["ids"]))
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": problem["weight"]})
    logprob, _, _ = score(tmp_path)
    assert np.array_equal(numpy_reader.load_file(tmp_path / "scores.safetensors")["logprob"], logprob)
