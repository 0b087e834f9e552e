"""Builds .safetensors bytes by hand, so that tests can break them."""

import json
import struct

import numpy as np

DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32", "int8": "I8", "bool": "BOOL"}


def bf16_bits(values):
    """fp32 array to the bits of bfloat16, rounded to nearest even. Write them with the dtype "BF16"."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def entries(tensors):
    """Header entries and data for {name: array or (array, dtype name)}."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        array, dtype = tensor if isinstance(tensor, tuple) else (tensor, None)
        array = np.ascontiguousarray(array)
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype or DTYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def pack(header, data):
    """The file's bytes; header is a dict or JSON text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(path, tensors):
    path.write_bytes(pack(*entries(tensors)))
    return path


def read(path):
    """{name: fp32 array} of a file that holds F32 tensors only, and its metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    out = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        out[name] = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"])
    return out, metadata
