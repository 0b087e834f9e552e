"""Scoring NumPy arrays, and what an import costs: no PyTorch anywhere."""

import subprocess
import sys

import lmhead
import numpy as np
import pytest


def plain(hidden, weight, targets, temperature=1.0, softcap=None, scale=1.0, bias=0.0):
    """Log-prob and entropy in fp64 through the whole logits."""
    z = scale * (hidden.astype(np.float64) @ weight.astype(np.float64).T + bias)
    if softcap:
        z = softcap * np.tanh(z / softcap)
    z = z / np.broadcast_to(temperature, targets.shape)[..., None]
    z = z - z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return np.take_along_axis(logp, targets[..., None].astype(np.int64), -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


def field_of(array):
    """The same values as a field of a structured array, whose steps are no multiple of an element."""
    lines = array if array.ndim == 2 else array[:, None]
    table = np.zeros(len(lines), [("values", array.dtype, lines.shape[1:]), ("odd", np.uint8)])
    table["values"] = lines
    return table["values"].reshape(array.shape) if array.ndim == 2 else table["values"][:, 0]


@pytest.fixture
def data():
    r = np.random.default_rng(1)
    return r.standard_normal((3, 5, 17), np.float32), r.standard_normal((41, 17), np.float32), r.integers(0, 41, (3, 5))


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_values(data, ids):
    hidden, weight, targets = data
    r = np.random.default_rng(2)
    bias, t = r.standard_normal(41, np.float32), r.uniform(0.5, 2, (3, 5)).astype(np.float32)
    options = dict(softcap=3.0, bias=bias)
    got = lmhead.linear_logprobs(
        hidden, weight, targets.astype(ids), temperature=t, logit_scale=0.7, return_entropy=True, **options
    )
    want = plain(hidden, weight, targets, t, scale=0.7, **options)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == np.float32 and g.shape == (3, 5)
        assert np.abs(g - w).max() <= 4e-6
    assert np.array_equal(lmhead.linear_logprobs(hidden, weight, targets), lmhead.linear_logprobs(hidden, weight, targets))


def test_strides_leading_dims_and_fp64(data):
    hidden, weight, targets = data
    want = lmhead.linear_logprobs(hidden, weight, targets)
    wide = np.full((41, 23), np.nan, np.float32)
    wide[:, :17] = weight
    assert np.array_equal(lmhead.linear_logprobs(np.asfortranarray(hidden), wide[:, :17], targets), want)
    assert np.array_equal(lmhead.linear_logprobs(hidden[::-1, ::2], weight, targets[::-1, ::2]), want[::-1, ::2])
    assert np.array_equal(lmhead.linear_logprobs(hidden[0, ::-1], weight, targets[0, ::-1]), want[0, ::-1])
    same = np.broadcast_to(hidden[0, 0], (5, 17))
    assert np.array_equal(lmhead.linear_logprobs(same, weight, np.broadcast_to(targets[0, 0], 5)), [want[0, 0]] * 5)
    rows, ids = field_of(hidden[0]), field_of(targets[0])
    assert rows.strides[0] % 4 and ids.strides[0] % 8
    assert np.array_equal(lmhead.linear_logprobs(rows, weight, ids), want[0])
    bias = np.linspace(-1, 1, 41, dtype=np.float32)
    odd, even = (lmhead.linear_logprobs(hidden, weight, targets, bias=b) for b in (field_of(bias), bias))
    assert np.array_equal(odd, even)
    assert lmhead.linear_logprobs(hidden[0, 0], weight, targets[0, 0]).shape == ()
    assert lmhead.linear_logprobs(hidden[:0], weight, targets[:0]).shape == (0, 5)
    double = lmhead.linear_logprobs(hidden.astype(np.float64), weight.astype(np.float64), targets)
    assert double.dtype == np.float64 and np.abs(double - plain(hidden, weight, targets)[0]).max() <= 1e-12


def test_temperatures_of_any_real_type(data):
    hidden, weight, targets = data
    want = lmhead.linear_logprobs(hidden, weight, targets, temperature=2.0)
    for t in (np.full((3, 5), 2), np.full((3, 5), 2.0), np.full((3, 5), 2, ">f2"), np.array([2]), np.float16(2)):
        assert np.array_equal(lmhead.linear_logprobs(hidden, weight, targets, temperature=t), want)


def test_active_and_ignored_rows_are_zero(data):
    hidden, weight, targets = data
    targets[0, 0], hidden[0, 1] = -100, np.nan
    active = np.ones((3, 5), bool)
    active[0, 1] = False
    logprob, entropy = lmhead.linear_logprobs(hidden, weight, targets, active=active, return_entropy=True)
    assert (logprob[0, :2] == 0).all() and (entropy[0, :2] == 0).all()
    assert np.isfinite(logprob).all() and (logprob[1:] < 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"targets": np.full((3, 5), 41)}, ValueError, "targets: expected ids in"),
        ({"targets": np.zeros((3, 4), np.int64)}, ValueError, r"targets: expected \[3, 5\]"),
        ({"targets": np.zeros((3, 5), np.float32)}, TypeError, "targets: expected int32 or int64, got float32"),
        ({"weight": np.zeros((41, 16), np.float32)}, ValueError, r"weight: expected \[V, 17\]"),
        ({"weight": np.zeros((17, 41), np.float32).T}, ValueError, "weight: expected contiguous columns"),
        ({"weight": np.zeros((41, 17), np.complex64)}, TypeError, "weight: expected float32, bfloat16, float16 or float64, got complex64"),
        ({"weight": [[0.0]]}, TypeError, "weight: expected numpy.ndarray like hidden, got list"),
        ({"hidden": [[0.0]]}, TypeError, "hidden: expected torch.Tensor or numpy.ndarray, got list"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0, got 0"),
        ({"temperature": "1"}, TypeError, "temperature: expected a number, got str"),
        ({"temperature": np.full((3, 5), 1j)}, TypeError, "temperature: expected real numbers, got complex128"),
        ({"hidden": np.zeros((3, 5, 17), ">f4")}, TypeError, "hidden: expected this machine's byte order, got >f4"),
        ({"weight": np.zeros((41, 17), ">f4")}, TypeError, "weight: expected this machine's byte order, got >f4"),
        ({"weight": field_of(np.zeros((41, 17), np.float32))}, ValueError, "weight: expected steps of whole elements"),
        ({"bias": np.zeros((41, 41), np.float32)}, ValueError, r"bias: expected \[41\], got \[41, 41\]"),
        ({"softcap": "3"}, TypeError, "softcap: expected a number, got str"),
        ({"logit_scale": None}, TypeError, "logit_scale: expected a number, got NoneType"),
        ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got NoneType"),
        ({"valid_vocab": np.array([8, 8])}, TypeError, "valid_vocab: expected an integer, got ndarray"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index: expected an integer within 64 bits, got 9223372036854775808"),
        ({"valid_vocab": 3.0}, TypeError, "valid_vocab: expected an integer, got float"),
        ({"check": "no"}, TypeError, "check: expected a bool or None, got str"),
        ({"backend": None}, TypeError, "backend: expected a name, got NoneType"),
        ({"out_of_vocab": ["zero"]}, ValueError, 'out_of_vocab: expected "error" or "zero"'),
        ({"workspace_bytes": 2**64}, ValueError, "workspace_bytes: expected an integer within 64 bits"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a finite number > 0, got -1"),
        ({"active": np.ones((3, 5))}, TypeError, "active: expected bool or an integer type"),
        ({"out_of_vocab": "ignore"}, ValueError, 'out_of_vocab: expected "error" or "zero"'),
        ({"backend": "fast"}, ValueError, "backend: expected auto, .*reference, got fast"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes: expected >= 1 bytes, got 0"),
        ({"cache_bytes": 1.5}, TypeError, "cache_bytes: expected a number of bytes, got float"),
        ({"entropy_requires_grad": True}, ValueError, "entropy_requires_grad: expected return_entropy=True"),
        ({"return_entropy": True, "entropy_requires_grad": True}, NotImplementedError, "expected torch tensors"),
        (
            {"return_entropy": True, "entropy_requires_grad": True, "inference_only": True},
            ValueError,
            "entropy_requires_grad: expected inference_only=False",
        ),
    ],
)
def test_errors_name_the_argument(data, change, error, message):
    arguments = dict(zip(("hidden", "weight", "targets"), data, strict=True)) | change
    with pytest.raises(error, match=message):
        lmhead.linear_logprobs(**arguments)


def test_options_may_be_numbers_of_numpy_and_flags_integers(data):
    options = {"ignore_index": np.int64(-100), "valid_vocab": np.int32(data[1].shape[0]), "workspace_bytes": np.int64(1 << 20)}
    result = lmhead.linear_logprobs(*data, **options, check=1, inference_only=0)
    np.testing.assert_array_equal(result, lmhead.linear_logprobs(*data))


def test_info_and_last_backend(data):
    info = lmhead.info()
    assert info["version"] == lmhead.__version__
    assert info["backends"][-1] == {
        "name": "reference",
        "device": "cpu",
        "available": True,
        "description": info["backends"][-1]["description"],
    }
    lmhead.linear_logprobs(*data, backend="reference")
    assert lmhead.last_backend() == "reference"


def test_import_is_quick_and_leaves_torch_alone():
    code = (
        "import sys, time; start = time.process_time(); import lmhead; took = time.process_time() - start;"
        "print(took, 'torch' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    took, torch_too = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(torch_too) == {"False"}
    assert min(map(float, took)) <= 0.3
