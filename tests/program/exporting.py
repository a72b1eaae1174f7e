"""Exports models, with the results of eager PyTorch. The models are in zoo.py and hugging_face.py.

Writes zoo.json, the list of the names; refused.json, the reason in one line for each model that torch.export refuses; and
for each other model

    NAME.pt2                   the exported program, with the shapes of one microbatch, or dynamic ones
    NAME.inputs.safetensors    the inputs of all microbatches
    NAME.expected.safetensors  outputs, gradients and buffers of the original module
    NAME.json                  how to run it, and where to cut it

Inputs are named by their path, args.0, args.0.1, kwargs.batch.ids; those of the microbatches are joined along dimension
0, and those without dimensions are stacked to [M]. None and Python constants are left out.

The expected values come from a fresh copy of the module, which runs the microbatches one after the other without an
optimizer step:

    output.I    the I-th output in the order of torch.utils._pytree, joined like the inputs; an integer is int64 [M];
                None is left out
    grad.NAME   gradient of each parameter that has one; a tied parameter is under each of its names
    buffer.NAME buffer after the last microbatch

A microbatch's loss is the sum of the means of its floating-point outputs, each mean taken in the output's dtype and
then made float32. Gradients are those of the mean of the M losses, accumulated from (loss / M).backward().

In NAME.json:

    name, microbatches  M
    mode                "train", or "eval" where the expected values are those of model.eval(). The program has been
                        exported in training mode all the same, except for eval_exported.
    tolerance           the largest difference allowed, relative to the tensor's largest absolute value or to 1,
                        whichever is larger
    outputs             the number of outputs, including None and integers
    shared              lists of names that are one parameter
    dynamic             whether sizes are symbolic; then the inputs have other sizes than the exported example
    cuts                where to cut: "at" lists modules, each called once, NAME to cut before it and NAME:end to cut
                        after it; "stages" is the number of stages, "why" the purpose. With "marks" the cuts are
                        the program's pipe_split() nodes, and stages that are empty do not count.

Every gradient is at least ten times the tolerance, so that a missing one is detected. Each program is read back, its
cuts are checked, and it must compute the same as the module.
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import operator
import pathlib
import sys
import time
import traceback
import typing
import warnings
import zlib

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")
warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")

import safetensors  # noqa: E402
import torch  # noqa: E402
import torch.distributed.pipelining  # noqa: E402, registers pipe_split
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

MICROBATCHES = 4


@dataclasses.dataclass
class Entry:
    model: typing.Callable[[], nn.Module]
    # Returns a random microbatch: (args, kwargs). Its parameters, if any, are sizes.
    inputs: typing.Callable[..., tuple[tuple, dict]]
    # (modules to cut at, why)
    cuts: list[tuple[list[str], str]]
    # Number of stages that the model's pipe_split() calls make.
    marks: int = 0
    mode: str = "train"
    tolerance: float = 1e-5
    # torch.export's dynamic_shapes, and the sizes for `inputs` of the example that is exported.
    dynamic: dict | None = None
    example: dict = dataclasses.field(default_factory=dict)
    exported_mode: str = "train"
    functionalized: bool = False
    # Parameters without gradient.
    unused: tuple[str, ...] = ()
    # Suffixes of parameters whose gradient is only rounding error: softmax cancels a bias that is added to all keys.
    faint: tuple[str, ...] = ()
    # True if torch.export refuses the model; then the export is only tried.
    refused: bool = False


class Refused(Exception):
    """Raised when torch.export refuses a model, with the reason in one line."""


def joined(values):
    """Returns one input or output of all microbatches as one tensor."""
    if not isinstance(values[0], torch.Tensor):
        return torch.tensor(values, dtype=torch.int64)
    return (torch.cat if values[0].dim() else torch.stack)([value.detach() for value in values]).contiguous()


def named_inputs(microbatches):
    leaves, _ = pytree.tree_flatten_with_path(microbatches[0])
    names = []
    for (side, *path), _ in leaves:
        steps = [key.idx if isinstance(key, pytree.SequenceKey) else key.key for key in path]
        names.append(".".join(map(str, [("args", "kwargs")[side.idx], *steps])))
    columns = zip(*map(pytree.tree_leaves, microbatches))
    return {name: joined(column) for name, column in zip(names, columns) if isinstance(column[0], torch.Tensor)}


def save_tensors(tensors, path):
    """Writes what safetensors.torch.save_file does, without NumPy."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    safetensors.serialize_file(specs, path)


def computed(model, microbatches):
    """Returns the content of NAME.expected.safetensors, and the number of outputs."""
    outputs = []
    for args, kwargs in copy.deepcopy(microbatches):
        outputs.append(pytree.tree_leaves(model(*args, **kwargs)))
        floats = [x for x in outputs[-1] if isinstance(x, torch.Tensor) and x.is_floating_point()]
        loss = sum(x.mean().float() for x in floats)
        (loss / len(microbatches)).backward()
    values = {f"output.{i}": joined(column) for i, column in enumerate(zip(*outputs)) if column[0] is not None}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            values[f"grad.{name}"] = parameter.grad.to_dense().clone().contiguous()
    for name, buffer in model.named_buffers():
        values[f"buffer.{name}"] = buffer.detach().clone().contiguous()
    return values, len(outputs[0])


def shared_names(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def exported(model, entry, microbatch):
    args, kwargs = entry.inputs(**entry.example) if entry.dynamic else copy.deepcopy(microbatch)
    model.train(entry.exported_mode == "train")
    try:
        # torch.export prints what it has traced before the reason.
        with contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=entry.dynamic)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "/torch/" not in one.filename]
        place = f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
        raise Refused(f"{reason} ({place})") from error
    return program.run_decompositions({}) if entry.functionalized else program


def check_gradients(model, entry, expected):
    for name, _ in model.named_parameters():
        gradient = expected.get(f"grad.{name}")
        assert (gradient is None) == (name in entry.unused), f"{name} is not as `unused` says"
        if gradient is None:
            continue
        largest = gradient.abs().max().item()
        if name.endswith(entry.faint):
            assert largest <= entry.tolerance, f"{name} has a gradient of {largest:.2g}, so it is not faint"
        else:
            assert largest > 10 * entry.tolerance, f"the gradient of {name} is no more than {largest:.2g}"


def check_cuts(program, entry):
    """Checks that every cut is at modules of the program, in their order, and that each stage computes something."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    spans = {}
    for i, node in enumerate(calls):
        for path, _ in node.meta.get("nn_module_stack", {}).values():
            spans.setdefault(path, [i, i])[1] = i
    for at, _ in entry.cuts:
        places = [spans[name.removesuffix(":end")] for name in at]
        starts = [span[1] + 1 if name.endswith(":end") else span[0] for name, span in zip(at, places)]
        bounds = [0, *starts, len(calls)]
        assert all(map(operator.lt, bounds, bounds[1:])), f"the cut at {at} has an empty stage: {bounds}"
    marks = [i for i, node in enumerate(calls) if node.target == torch.ops.pippy._pipe_split.default]
    bounds = [-1, *marks, len(calls)]
    found = sum(upper - lower > 1 for lower, upper in zip(bounds, bounds[1:])) if marks else 0
    assert found == entry.marks, f"the marks make {found} stages, not {entry.marks}"


def check_program(program, entry, microbatches, expected, shared):
    """Checks that the program that was read back computes the same as the module."""
    if entry.mode == "eval" and entry.exported_mode == "train":
        for node in program.graph.nodes:
            if node.target == torch.ops.aten.dropout.default:
                node.update_arg(2, False)
            if node.target == torch.ops.aten.scaled_dot_product_attention.default and len(node.args) > 4:
                node.update_arg(4, 0.0)
    # A functionalized BatchNorm saves its statistics for the backward, which are then overwritten.
    with contextlib.ExitStack() as stack:
        if entry.functionalized:
            stack.enter_context(torch.autograd.graph.allow_mutation_on_saved_tensors())
        found, _ = computed(program.module(), microbatches)
    for group in shared:
        for name in group:
            present = [f"grad.{other}" for other in group if f"grad.{other}" in found]
            found.setdefault(f"grad.{name}", found[present[0]])
    assert found.keys() == expected.keys(), f"the program's values differ: {found.keys() ^ expected.keys()}"
    for name, right in expected.items():
        ours = found[name]
        assert (ours.dtype, ours.shape) == (right.dtype, right.shape), f"{name} is {ours.dtype} {list(ours.shape)}"
        difference = (ours.double() - right.double()).abs().max().item()
        allowed = entry.tolerance * max(1, right.double().abs().max().item())
        assert difference <= allowed, f"{name} of the program differs by {difference:.2g}"


def write_model(folder, name, entry):
    """Writes the files of a model, and returns the number of nodes, including those of regions."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model = entry.model()
    microbatches = [entry.inputs() for _ in range(MICROBATCHES)]

    eager = copy.deepcopy(model).train(entry.mode == "train")
    expected, outputs = computed(eager, microbatches)
    shared = shared_names(model)
    check_gradients(model, entry, expected)

    torch.export.save(exported(model, entry, microbatches[0]), folder / f"{name}.pt2")
    program = torch.export.load(folder / f"{name}.pt2")
    check_cuts(program, entry)
    check_program(program, entry, microbatches, expected, shared)

    save_tensors(named_inputs(microbatches), folder / f"{name}.inputs.safetensors")
    save_tensors(expected, folder / f"{name}.expected.safetensors")
    cuts = [{"at": at, "stages": len(at) + 1, "why": why} for at, why in entry.cuts]
    if entry.marks:
        cuts.append({"at": [], "marks": True, "stages": entry.marks, "why": "at its pipe_split() marks"})
    description = {
        "name": name,
        "microbatches": MICROBATCHES,
        "mode": entry.mode,
        "tolerance": entry.tolerance,
        "outputs": outputs,
        "shared": shared,
        "cuts": cuts,
        "dynamic": entry.dynamic is not None,
    }
    (folder / f"{name}.json").write_text(json.dumps(description, indent=2) + "\n")
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum(len(graph.nodes) for graph in graphs)


def write(folder, entries, names):
    """Returns True if exactly the expected models are refused."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    written, refused = [], {}
    for name in names:
        started = time.perf_counter()
        entry = entries[name]
        try:
            if entry.refused:
                exported(entry.model(), entry, entry.inputs())
                print(f"{name} should be refused.", file=sys.stderr)
                continue
            found = f"{write_model(folder, name, entry):5} nodes"
            written.append(name)
        except Refused as error:
            refused[name] = str(error)
            found = "    refused"
            if not entry.refused:
                print(f"{name} should not be refused: {error}", file=sys.stderr)
        except Exception as error:
            error.add_note(f"while writing the model {name}")
            raise
        print(f"{name:18} {found} {time.perf_counter() - started:6.2f} s", flush=True)
    (folder / "zoo.json").write_text(json.dumps(written, indent=2) + "\n")
    (folder / "refused.json").write_text(json.dumps(refused, indent=2) + "\n")
    print(f"{len(written)} models in {folder}, {len(refused)} refused, {time.perf_counter() - start:.1f} s")
    return [name for name in names if entries[name].refused] == list(refused)


def main(doc, entries):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write"])
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=list(entries), metavar="NAME", help="one of " + ", ".join(entries))
    arguments = parser.parse_args()
    return 0 if write(arguments.folder, entries, arguments.only or list(entries)) else 1
