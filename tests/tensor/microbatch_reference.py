"""Asks the installed torch.distributed.pipelining  to split and merge nested values, for our tests to compare.

    microbatch_reference.py OUTDIR [--cases 3000] [--seed 1]

OUTDIR/cases.pt is a list of cases, written by torch.save for torch::pickle_load. A case is a dict:

    name                      what it is, with seed and number
    args, kwargs, chunks      what is split
    args_spec, kwargs_spec    () for none, or (spec,)
    debug                     whether chunks are masked whole tensors
    raised                    what a right answer raises, "" when it answers
    split_args, split_kwargs  a right answer: a list of tuples and a list of dicts
    fault                     "" when PyTorch gives the right answer, else why it does not (reference.md, item 29)
    merges                    a list of merges, each a dict of
        name, debug, raised, fault as above
        chunks                what is merged; "args" or "kwargs" for those of the split, as they are
        spec                  () for none, or (spec,)
        result                () when it raises, else (value,)

A spec is a structure of d for TensorChunkSpec(d), "R" for _Replicate, "S" for sum_reducer, and None for None.

The right answer is PyTorch's own, after care for what it does not see: structures that differ are an error, as are no
chunks at all, dicts are matched by key, containers may have no leaves, and replicated values are compared as a whole.
"""

import argparse
import collections
import functools
import math
import pathlib
import random
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
warnings.filterwarnings("ignore", message="Using a non-tuple sequence")
warnings.filterwarnings("ignore", message="Casting complex values")

import torch
from torch.distributed.pipelining import microbatch as reference

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OTHER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
KEYS = ("x", "mask", "a b", "it's", "", "ü", "bias", "0")
STRINGS = ("", "relu", "R", "S", "ümlaut 'quoted'")


# Structures


def is_leaf(value):
    return not isinstance(value, (tuple, list, dict))


def children(value):
    return list(value.values()) if isinstance(value, dict) else list(value)


def rebuilt(container, new_children):
    if isinstance(container, dict):
        return dict(zip(container, new_children, strict=True))
    return type(container)(new_children)


def leaves(value):
    return [value] if is_leaf(value) else [leaf for child in children(value) for leaf in leaves(child)]


def map_leaves(act, *values):
    """Over values of one structure, leaf by leaf."""
    first = values[0]
    if is_leaf(first):
        return act(*values)
    return rebuilt(first, [map_leaves(act, *some) for some in zip(*map(children, values), strict=True)])


def same_structure(one, other):
    if is_leaf(one) or is_leaf(other):
        return is_leaf(one) and is_leaf(other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_structure(one[key], other[key]) for key in one)
    return all(map(same_structure, one, other))


def in_order_of(model, value):
    """The value with the keys of its dicts in the order of those of the model, which has its structure."""
    if is_leaf(model):
        return value
    if isinstance(model, dict):
        return {key: in_order_of(model[key], value[key]) for key in model}
    return rebuilt(value, [in_order_of(*some) for some in zip(model, value, strict=True)])


# Specs


def decoded(spec):
    def one(leaf):
        if leaf == "R":
            return reference._Replicate()
        if leaf == "S":
            return reference.sum_reducer
        return leaf if leaf is None else reference.TensorChunkSpec(leaf)

    return map_leaves(one, spec)


def optional(spec):
    """() or (spec,) as PyTorch takes it."""
    return decoded(spec[0]) if spec else None


# PyTorch, and what would be right


def answer_of(act):
    """What it raised, "" for nothing, and what it answered."""
    try:
        return "", act()
    except Exception as error:  # PyTorch raises whatever the first thing to go wrong raises
        return f"{type(error).__name__}: {error}"[:200], None


class Whole:
    """A leaf that is equal to another when its type and all that it holds are."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return identical(self.value, other.value)


def identical(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    return one == other or (one != one and other != other)


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def identical_answers(one, other):
    """Whether two answers are the same, raised or not. A mere tensor agrees only with one of its shape and values."""
    if bool(one[0]) != bool(other[0]):
        return False
    if one[0]:
        return True
    if not same_structure(one[1], other[1]):
        return False
    return all(map(identical, leaves(one[1]), leaves(in_order_of(one[1], other[1]))))


def right_split(args, kwargs, chunks, args_spec, kwargs_spec):
    if chunks < 1:
        return "no chunks", None
    for value, spec in ((args, args_spec), (kwargs, kwargs_spec)):
        if spec and not same_structure(value, spec[0]):
            return "structures differ", None
    # A replicated number more changes nothing, except that PyTorch then meets a leaf.
    args_spec = decoded((*in_order_of(args, args_spec[0]), "R")) if args_spec else None
    kwargs_spec = decoded({**in_order_of(kwargs, kwargs_spec[0]), " more": "R"}) if kwargs_spec else None
    raised, answer = answer_of(
        lambda: reference.split_args_kwargs_into_chunks((*args, 0), {**kwargs, " more": 0}, chunks, args_spec, kwargs_spec)
    )
    if raised:
        return raised, None
    without = [{key: value for key, value in chunk.items() if key != " more"} for chunk in answer[1]]
    return "", ([chunk[:-1] for chunk in answer[0]], without)


def drops_chunks(chunks, spec):
    """Whether cat would leave out a tensor of shape [0], which it does whatever the dimension and the other shapes are."""

    def drops(kind, *parts):
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if type(kind) is not int or all(tensor.shape != (0,) for tensor in tensors):
            return False
        return kind not in (0, -1) or any(tensor.dim() != 1 for tensor in tensors)

    return any(leaves(map_leaves(drops, full_spec(chunks[0], spec), *chunks)))


def right_merge(chunks, spec):
    if not chunks:
        return "no chunks", None
    model = spec[0] if spec else chunks[0]
    if not all(same_structure(model, chunk) for chunk in chunks):
        return "structures differ", None
    chunks = [in_order_of(model, chunk) for chunk in chunks]
    if drops_chunks(chunks, spec):
        return "shapes differ", None
    if not spec:
        return answer_of(lambda: reference.merge_chunks(chunks, None))
    chunks = [
        map_leaves(lambda kind, leaf: Whole(leaf) if kind in ("R", None) else leaf, spec[0], chunk) for chunk in chunks
    ]
    raised, merged = answer_of(lambda: reference.merge_chunks(chunks, decoded(spec[0])))
    return raised, None if raised else map_leaves(lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, merged)


def fault_of(plain, right, values, specs, otherwise):
    """Why PyTorch's plain answer is not the right one; "" when it is."""
    if identical_answers(plain, right):
        return ""
    if any(not same_structure(value, spec) for value, spec in zip(values, specs, strict=True)):
        return "compares structures by their number of leaves"
    if any(repr(in_order_of(spec, value)) != repr(value) for value, spec in zip(values, specs, strict=True)):
        return "matches dicts by position"
    if any(not is_leaf(value) and value and not leaves(value) for value in values):
        return "fails on containers without leaves"
    return otherwise


def split(args, kwargs, chunks, args_spec, kwargs_spec):
    """What a right answer raises, the answer, and PyTorch's fault."""
    plain = answer_of(
        lambda: reference.split_args_kwargs_into_chunks(args, kwargs, chunks, optional(args_spec), optional(kwargs_spec))
    )
    right = right_split(args, kwargs, chunks, args_spec, kwargs_spec)
    specs = [spec[0] if spec else value for value, spec in ((args, args_spec), (kwargs, kwargs_spec))]
    return *right, fault_of(plain, right, (args, kwargs), specs, "splits into no chunks at all")


def merge(chunks, spec):
    plain = answer_of(lambda: reference.merge_chunks(chunks, optional(spec)))
    right = right_merge(chunks, spec)
    if not chunks:
        return *right, "" if plain[0] else "merges no chunks at all"
    model = spec[0] if spec else chunks[0]
    otherwise = "compares replicated values with =="
    if right[0] == "shapes differ":
        otherwise = "drops tensors of shape [0]"
    return *right, fault_of(plain, right, chunks, [model] * len(chunks), otherwise)


# Drawing


class Draw:
    def __init__(self, seed, number):
        # A case has numbers of its own, so that it is the same in a run of more cases.
        self.random = random.Random(seed * 1_000_003 + number)
        self.torch = torch.Generator().manual_seed(seed * 1_000_003 + number)

    def percent(self, chance):
        return self.random.randrange(100) < chance

    def between(self, low, high):
        return self.random.randint(low, high)

    def element_of(self, sequence):
        return sequence[self.random.randrange(len(sequence))]

    def keys(self, count):
        return self.random.sample(KEYS, count)

    # Values

    def numbers(self, shape, dtype):
        if 0 in shape:
            # Parts of nothing may lie past its end, which torch::pickle_load refuses: so there is something.
            room = math.prod(max(size, 1) for size in shape)
            return self.numbers([room], dtype).as_strided(shape, torch.empty(shape).stride())
        values = torch.randint(-20, 20, shape, generator=self.torch)
        return values > 0 if dtype is torch.bool else values.to(dtype)

    def tensor(self, rows):
        if self.percent(3):
            shape = []
        else:
            shape = [self.between(1, 4) for _ in range(self.element_of((1, 1, 2, 2, 2, 3, 4)))]
            shape[0] = rows if self.percent(90) else self.between(1, 9)
            if self.percent(3):
                shape[self.between(0, len(shape) - 1)] = 0
        dtype = self.element_of(FLOATING if self.percent(60) else OTHER)
        if shape and 0 not in shape and self.percent(40):
            tensor = self.layout(shape, dtype)
        else:
            tensor = self.numbers(shape, dtype)
        if dtype in FLOATING and self.percent(3) and tensor.numel():
            tensor = tensor.clone()
            tensor[(0,) * tensor.dim()] = float("nan")
        return tensor.requires_grad_() if dtype in FLOATING and self.percent(40) else tensor

    def layout(self, shape, dtype):
        """Other than contiguous, where the shape allows."""
        dim = self.between(0, len(shape) - 1)
        kind = self.element_of(("transposed", "every second", "expanded", "offset"))
        if kind == "transposed":
            other = self.between(0, len(shape) - 1)
            shape = list(shape)
            shape[dim], shape[other] = shape[other], shape[dim]
            return self.numbers(shape, dtype).transpose(dim, other)
        if kind == "every second":
            wide = self.numbers([size * 2 if i == dim else size for i, size in enumerate(shape)], dtype)
            return wide[tuple(slice(None, None, 2 if i == dim else 1) for i in range(len(shape)))]
        if kind == "expanded":
            return self.numbers([1 if i == dim else size for i, size in enumerate(shape)], dtype).expand(shape)
        longer = self.numbers([size + 3 if i == dim else size for i, size in enumerate(shape)], dtype)
        return longer.narrow(dim, 2, shape[dim])

    def plain(self):
        kind = self.between(0, 5)
        if kind == 0:
            return self.between(-5, 5)
        if kind == 1:
            return float("nan") if self.percent(5) else self.between(-9, 9) / 4
        if kind == 2:
            return self.percent(50)
        if kind == 3:
            return self.element_of(STRINGS)
        if kind == 4:
            return None
        # Of just eight bytes: torch::pickle_load reads no other long ones.
        return self.element_of((-1, 1)) * self.between(2**60, 2**62)

    def value(self, rows, depth):
        if depth == 0 or self.percent(65):
            return self.tensor(rows) if self.percent(65) else self.plain()
        inside = [self.value(rows, depth - 1) for _ in range(self.element_of((0, 1, 1, 2, 2, 3)))]
        kind = self.element_of((tuple, list, dict))
        return dict(zip(self.keys(len(inside)), inside)) if kind is dict else kind(inside)

    # Specs

    def spec(self, value):
        def one(leaf):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or self.percent(20):
                return "R"
            dims = [0] if self.percent(40) else [dim for dim in range(leaf.dim()) if leaf.size(dim) > 1] or [0]
            return self.element_of(dims) - (leaf.dim() if self.percent(40) else 0)

        return map_leaves(one, value)

    def shuffled(self, value):
        """The keys of all dicts in another order."""
        if is_leaf(value):
            return value
        inside = list(map(self.shuffled, children(value)))
        if not isinstance(value, dict):
            return rebuilt(value, inside)
        items = list(zip(value, inside))
        self.random.shuffle(items)
        return dict(items)

    def damaged(self, spec, leaf):
        """One change somewhere inside, with `leaf()` for what is put in place of a leaf."""
        if is_leaf(spec):
            kind = self.between(0, 3)
            if kind == 0:
                return self.element_of(([spec], (spec,), {"x": spec}))
            return leaf(spec)
        if spec and self.percent(60):
            inside = children(spec)
            at = self.between(0, len(inside) - 1)
            inside[at] = self.damaged(inside[at], leaf)
            return rebuilt(spec, inside)
        return self.damaged_container(spec, leaf)

    def damaged_container(self, spec, leaf):
        kind = self.element_of(("drop", "add", "kind", "leaf", "key"))
        if isinstance(spec, dict):
            if kind == "key" and spec:
                names = [f"{key}?" if i == 0 else key for i, key in enumerate(spec)]
                return dict(zip(names, spec.values()))
            if kind == "drop" and spec:
                return dict(list(spec.items())[1:])
            if kind == "leaf":
                return leaf(0)
            if kind == "kind":
                return list(spec.values())
            return {**spec, "more": leaf(0)}
        if kind == "drop" and spec:
            return spec[:-1]
        if kind == "leaf":
            return leaf(0)
        if kind == "kind":
            return list(spec) if isinstance(spec, tuple) else tuple(spec)
        if kind == "key":
            return {str(i): value for i, value in enumerate(spec)}
        return type(spec)([*spec, leaf(0)])

    def wrong_spec(self, spec):
        return self.element_of((None, "S", 7, -9, 0, 1, "R"))


# A case


def drawn_args(draw):
    rows = draw.between(1, 9)
    args = tuple(draw.value(rows, 3) for _ in range(draw.element_of((0, 1, 1, 2, 2, 3, 4))))
    names = draw.keys(draw.element_of((0, 0, 1, 1, 2, 3)))
    kwargs = {name: draw.value(rows, 3) for name in names}
    chunks = draw.element_of((1, 1, 2, 2, 3, 4, rows, rows, rows + 1, rows + 3))
    return args, kwargs, 0 if draw.percent(3) else chunks


def drawn_specs(draw, args, kwargs):
    """What is done to them, and () or (spec,) for args and for kwargs."""
    mood = draw.between(1, 100)
    if mood <= 35:
        return "default specs", (), ()
    specs = [draw.spec(args), draw.spec(kwargs)]
    if mood <= 45:
        return "one spec", *draw.element_of((((specs[0],), ()), ((), (specs[1],))))
    if mood <= 75:
        return "specs", (specs[0],), (specs[1],)
    if mood <= 80:
        return "shuffled specs", (draw.shuffled(specs[0]),), (draw.shuffled(specs[1]),)
    which = 0 if args and (not kwargs or draw.percent(60)) else 1
    while True:
        damaged = draw.damaged(specs[which], draw.wrong_spec)
        # A list for the tuple of args is PyTorch's to allow.
        if which == 1 or not isinstance(damaged, list):
            break
    specs[which] = damaged
    return "damaged specs", (specs[0],), (specs[1],)


def other_leaf(draw, leaf):
    """A leaf in place of another: of its own kind with another value or form, or of another kind."""
    if isinstance(leaf, torch.Tensor):
        kind = draw.between(0, 6)
        if kind == 0:
            return draw.plain()
        if kind == 1:
            return leaf.detach().to(draw.element_of(FLOATING))
        if kind == 2:
            return leaf.detach().unsqueeze(draw.between(0, leaf.dim()))
        if kind == 3 and leaf.dim():
            return leaf.detach().repeat_interleave(2, dim=draw.between(0, leaf.dim() - 1))
        if kind == 4:
            # Which cat skips, whatever the other shapes are.
            return leaf.new_zeros(0)
        if kind == 5:
            return leaf.detach().logical_not()
        return leaf.detach().clone()
    if draw.percent(30) and isinstance(leaf, (int, float)):
        # Equal for Python, and of another type.
        return draw.element_of((float(leaf), bool(leaf), torch.tensor(leaf)))
    return draw.tensor(2) if draw.percent(20) else draw.plain()


def cloned(value):
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def drawn_merge(draw, chunks, spec):
    """What is done, the chunks and () or (spec,); chunks is not empty, and spec is one that fits."""
    kind = draw.between(1, 100)
    chunks = list(chunks)
    at = draw.between(0, len(chunks) - 1)
    if kind <= 35:
        chunks[at] = draw.damaged(chunks[at], functools.partial(other_leaf, draw))
        return "damaged chunk", chunks, (spec,) if draw.percent(75) else ()
    if kind <= 42:
        chunks[at] = draw.shuffled(chunks[at])
        return "chunk with shuffled dicts", chunks, (spec,) if draw.percent(75) else ()
    if kind <= 50:
        return "some chunks", draw.random.sample(chunks, draw.between(0, len(chunks))), (spec,)
    if kind <= 60:
        return "cloned chunks", list(map(cloned, chunks)), (spec,)
    if kind <= 72:
        return "replicated", chunks, (map_leaves(lambda _: draw.element_of(("R", "R", "R", None)), spec),)
    if kind <= 84:
        return "sums", chunks, (map_leaves(lambda leaf: leaf if leaf == "R" and draw.percent(80) else "S", spec),)
    if kind <= 92 and chunks[at] and not is_leaf(chunks[at]):
        # Bare, as most models answer.
        first = [children(chunk)[0] for chunk in chunks]
        return "first of each", first, (children(spec)[0],)
    return "damaged spec", chunks, (draw.damaged(spec, draw.wrong_spec),)


def full_spec(value, spec):
    return spec[0] if spec else map_leaves(lambda leaf: 0 if isinstance(leaf, torch.Tensor) else "R", value)


def merge_record(name, chunks, spec, saved, debug):
    raised, result, fault = merge(chunks, spec)
    return {
        "name": name,
        "debug": debug,
        "raised": raised,
        "fault": fault,
        "chunks": saved,
        "spec": spec,
        "result": () if raised else (result,),
    }


def merges_of(draw, which, whole, chunks, spec, debug):
    yield merge_record(f"{which} as split", chunks, (full_spec(whole, spec),), which, debug)
    if draw.percent(30):
        yield merge_record(f"{which} without spec", chunks, (), which, debug)
    for _ in range(draw.between(1, 2)):
        # Chunks of dicts match their spec by key only if their spec's are in their order.
        name, changed, changed_spec = drawn_merge(draw, chunks, in_order_of(whole, full_spec(whole, spec)))
        yield merge_record(f"{which}: {name}", changed, changed_spec, changed, debug)


def case(seed, number):
    draw = Draw(seed, number)
    args, kwargs, chunks = drawn_args(draw)
    name, args_spec, kwargs_spec = drawn_specs(draw, args, kwargs)
    debug = draw.percent(8)
    reference._debug_mask_minibatches = debug
    raised, answer, fault = split(args, kwargs, chunks, args_spec, kwargs_spec)
    split_args, split_kwargs = answer if answer else ([], [])
    merges = []
    if not raised and split_args:
        merges += merges_of(draw, "args", args, split_args, args_spec, debug)
        if kwargs:
            merges += merges_of(draw, "kwargs", kwargs, split_kwargs, kwargs_spec, debug)
    return {
        "name": f"--seed {seed}, case {number} ({name})",
        "args": args,
        "kwargs": kwargs,
        "chunks": chunks,
        "args_spec": args_spec,
        "kwargs_spec": kwargs_spec,
        "debug": debug,
        "raised": raised,
        "split_args": split_args,
        "split_kwargs": split_kwargs,
        "fault": fault,
        "merges": merges,
    }


def print_tally(title, records):
    tally = collections.Counter(
        record["fault"] or ("raised" if record["raised"] else "answered") for record in records
    )
    print(f"{title}: " + ", ".join(f"{count} {what}" for what, count in tally.most_common()))


def main():
    arguments = argparse.ArgumentParser(description="Writes how the installed reference splits and merges, for our tests.")
    arguments.add_argument("folder", metavar="OUTDIR", type=pathlib.Path)
    arguments.add_argument("--cases", type=int, default=3000, help="(default: %(default)s)")
    arguments.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    cases = [case(options.seed, number) for number in range(options.cases)]
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.save(cases, options.folder / "cases.pt")
    print(f"seed {options.seed}, {len(cases)} cases; where it says what PyTorch does, it is wrong")
    print_tally("splits", cases)
    print_tally("merges", [record for one in cases for record in one["merges"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
