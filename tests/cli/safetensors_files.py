"""Reads and writes safetensors files without torch."""

import array
import json
import struct


def read_tensors(path):
    """Returns the float32, float64 and int64 tensors of a file as lists, others as bytes."""
    return read_tensors_and_metadata(path)[0]


def read_tensors_and_metadata(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__", None)
    codes = {"F32": "f", "F64": "d", "I64": "q"}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        code = codes.get(entry["dtype"])
        tensors[name] = list(array.array(code, data[begin:end])) if code else data[begin:end]
    return tensors, metadata


def write_tensors(path, tensors):
    """Writes one-dimensional float32 tensors, each a list of numbers."""
    header = {}
    data = b""
    for name, numbers in tensors.items():
        content = array.array("f", numbers).tobytes()
        header[name] = {"dtype": "F32", "shape": [len(numbers)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
