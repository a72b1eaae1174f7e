"""Files for and from Python's `safetensors` package , for SafetensorsReference.* of safetensors_test.cc.

    safetensors_reference.py write DIR [--files N] [--mutations N] [--seed S]
    safetensors_reference.py check DIR

`write` lets PyTorch write N.safetensors, each with a listing N.txt of what is in it: lines

    tensor NAME DTYPE SHAPE BYTES
    metadata KEY VALUE

with names, bytes, keys and values in hexadecimal, the dtype by torch's name, the shape as 2x3, and - for what is empty.
It also writes mutations.txt, with a line "accepted BYTES" or "refused BYTES" for each file that was damaged at random:
what PyTorch says of it.

The test reads the files, compares, and writes N.ours.safetensors. `check` lets PyTorch read those, compares them with
the listings, and with PyTorch's own files byte by byte.
"""

import argparse
import ctypes
import pathlib
import random
import struct
import sys
import warnings

import safetensors

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

# The dtypes that both PyTorch and torch have, with the bytes of an element.
DTYPES = {
    "bool": 1,
    "float4_e2m1fn_x2": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex64": 8,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
}
LETTERS = "abcXYZ019._-/ \\\"'\n\t\0\x7f{}[]:,äß€漢😀"


def text_at_random(rng, longest=12):
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(0, longest)))


def tensor_at_random(rng):
    """(dtype, shape, bytes)"""
    dtype = rng.choice(list(DTYPES))
    shape = [rng.choice([0, 1, 1, 2, 3, 4, 7]) for _ in range(rng.randint(0, 4))]
    if dtype == "float4_e2m1fn_x2" and not shape:
        shape = [3]
    size = DTYPES[dtype]
    for dimension in shape:
        size *= dimension
    return dtype, shape, bytes(rng.choices(range(2), k=size)) if dtype == "bool" else rng.randbytes(size)


def file_at_random(rng, most=12):
    """({name: (dtype, shape, bytes)}, metadata)"""
    tensors = {text_at_random(rng): tensor_at_random(rng) for _ in range(rng.randint(0, most))}
    metadata = {text_at_random(rng): text_at_random(rng, 40) for _ in range(rng.choice([0, 0, 1, 1, 3]))}
    return tensors, metadata


def references_bytes(tensors, metadata):
    buffers = {name: ctypes.create_string_buffer(data, max(len(data), 1)) for name, (_, _, data) in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffers[name]), data_len=len(data)
        )
        for name, (dtype, shape, data) in tensors.items()
    }
    return bytes(safetensors.serialize(specs, metadata=metadata or None))


def coded(value):
    data = value.encode() if isinstance(value, str) else value
    return data.hex() or "-"


def decoded(word):
    return b"" if word == "-" else bytes.fromhex(word)


def listing_of(tensors, metadata):
    lines = [
        f"tensor {coded(name)} {dtype} {'x'.join(map(str, shape)) or '-'} {coded(data)}"
        for name, (dtype, shape, data) in tensors.items()
    ]
    lines += [f"metadata {coded(key)} {coded(value)}" for key, value in metadata.items()]
    return "".join(line + "\n" for line in lines)


def read_listing(text):
    tensors, metadata = {}, {}
    for line in text.splitlines():
        kind, name, *words = line.split(" ")
        name = decoded(name).decode()
        if kind == "metadata":
            metadata[name] = decoded(words[0]).decode()
        else:
            shape = [] if words[1] == "-" else [int(size) for size in words[1].split("x")]
            tensors[name] = (words[0], shape, decoded(words[2]))
    return tensors, metadata


def damaged(rng, data):
    """A file with something wrong in its header, or after it, and mostly with a length that still fits."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = bytearray(data[8 : 8 + length]), data[8 + length :]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(header) + 1)
        upto = min(len(header), at + rng.randint(1, 20))
        digits = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
        kind = rng.randrange(8)
        if kind == 0:
            pieces = [b" ", b"0", b"-", b'"', b"\\", b"\xff", b"\xc3", b"\0", b"{", b"]", b",", b"1.5"]
            header[at:at] = rng.choice(pieces)
        elif kind == 1:
            del header[at:upto]
        elif kind == 2:
            header[at:at] = header[at:upto]
        elif kind == 3 and digits:
            at = rng.choice(digits)
            header[at : at + 1] = rng.choice([b"0", b"1", b"8", b"-1", b"1e1", b"18446744073709551616", b"9" * 19])
        elif kind == 4:
            rest = rng.choice([rest[:-1], rest + b"\0", rest[: len(rest) // 2], b""])
        elif kind == 5:
            codes = [b"BOOL", b"F4", b"F6_E2M3", b"U8", b"BF16", b"F32", b"C64", b"I64", b"F128", b"f32", b""]
            header = header.replace(rng.choice(codes), rng.choice(codes), 1)
        elif kind == 6:
            words = [b'"dtype"', b'"shape"', b'"data_offsets"', b"[", b"]", b"{", b"}", b",", b":"]
            header = header.replace(rng.choice(words), rng.choice([*words, b'"x":null,', b""]), 1)
        elif header:
            header[rng.randrange(len(header))] = rng.randrange(256)
    length = rng.choice([len(header)] * 12 + [len(header) + 1, len(header) - 1, len(header) + len(rest), 2**63])
    return struct.pack("<Q", max(length, 0)) + bytes(header) + rest


def verdict_on(data):
    try:
        safetensors.deserialize(data)
        return "accepted"
    except safetensors.SafetensorError:
        return "refused"


def write(folder, files, mutations, rng):
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.txt")]:
        old.unlink()
    for number in range(files):
        tensors, metadata = file_at_random(rng)
        (folder / f"{number}.safetensors").write_bytes(references_bytes(tensors, metadata))
        (folder / f"{number}.txt").write_text(listing_of(tensors, metadata))
    with open(folder / "mutations.txt", "w") as out:
        for _ in range(mutations):
            data = damaged(rng, references_bytes(*file_at_random(rng, most=3)))
            out.write(f"{verdict_on(data)} {data.hex()}\n")
    print(f"{files} files and {mutations} mutations in {folder}")


def differences(path, tensors, metadata):
    """Yields a sentence for each thing that PyTorch reads in `path` and that is not as listed."""
    with safetensors.safe_open(path, framework="pt") as file:
        if (file.metadata() or {}) != metadata:
            yield f"metadata {file.metadata()}, not {metadata}"
        if sorted(file.keys()) != sorted(tensors):
            yield f"tensors {sorted(file.keys())}, not {sorted(tensors)}"
            return
        for name, (dtype, shape, data) in tensors.items():
            tensor = file.get_tensor(name)
            found = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
            if (str(tensor.dtype), list(tensor.shape), found) != (f"torch.{dtype}", shape, data):
                yield f"{name!r} is {tensor.dtype} {list(tensor.shape)} {found.hex()}, not {dtype} {shape} {data.hex()}"


def check(folder):
    failures, files, same = 0, 0, 0
    for listing in sorted(folder.glob("*.txt")):
        if listing.stem == "mutations":
            continue
        ours = folder / f"{listing.stem}.ours.safetensors"
        tensors, metadata = read_listing(listing.read_text())
        found = list(differences(ours, tensors, metadata)) if ours.exists() else ["is missing"]
        # PyTorch writes the keys of metadata in an order that changes from run to run.
        if not found and len(metadata) < 2:
            same += 1
            if ours.read_bytes() != (folder / f"{listing.stem}.safetensors").read_bytes():
                found.append("has other bytes than PyTorch's file")
        for difference in found if failures < 10 else []:
            print(f"{ours}: {difference}", file=sys.stderr)
        failures += bool(found)
        files += 1
    print(f"{files} files of ours read by safetensors {safetensors.__version__}, {same} compared byte by byte")
    if failures:
        print(f"{failures} of them differ", file=sys.stderr)
    return 1 if failures or not same else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "check":
        return check(arguments.folder)
    print(f"seed {arguments.seed}")
    write(arguments.folder, arguments.files, arguments.mutations, random.Random(arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
