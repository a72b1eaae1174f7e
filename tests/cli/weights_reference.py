"""What weights_test.py needs PyTorch for.

    weights_reference.py data DIRECTORY                         batches for the model `tied` of models.py
    weights_reference.py weights MODEL.pt2 SEED DIRECTORY       random weights for a model, in every form that is read
    weights_reference.py run MODEL.pt2 INPUTS OUTPUT            what a program computes for two rows at a time
    weights_reference.py state MODEL.pt2 FILE                   the state_dict of a program
    weights_reference.py models DIRECTORY                       models with batches for them: classes, squares, own_loss
    weights_reference.py eval MODEL.pt2 LOSS FILE…              loss, accuracy and perplexity over batches, as JSON
"""

import json
import math
import os
import pathlib
import sys
import warnings

warnings.filterwarnings("ignore")

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "program"))

import safetensors  # noqa: E402
import torch  # noqa: E402
from exporting import save_tensors  # noqa: E402

# Number of rows of the example that `tied` was exported with.
ROWS = 2


def load_tensors(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def computed(module, ids):
    return torch.cat([module(rows) for rows in ids.split(ROWS)])


def write_data(directory):
    torch.manual_seed(0)
    for name in ["batch-0", "batch-1", "eval-0", "eval-1"]:
        ids = torch.randint(8, (8, 3))
        target = (ids + 1) % 8
        # Microbatches have other numbers of targets, and the first one of eval-0 has none.
        target[-1, 0] = -100
        if name == "eval-0":
            target[:ROWS] = -100
        save_tensors({"args.0": ids, "target": target}, f"{directory}/{name}.safetensors")


def write_weights(model, seed, directory):
    """whole.safetensors; hf: one file without the second name of the tied weight; sharded: the same in two shards."""
    torch.manual_seed(int(seed))
    state = torch.export.load(model).state_dict
    values = {}
    random = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in values:
            values[tensor.data_ptr()] = torch.randn(tensor.shape)
        random[name] = values[tensor.data_ptr()]
    for folder in ("hf", "sharded"):
        os.makedirs(f"{directory}/{folder}")
    save_tensors(random, f"{directory}/whole.safetensors")
    # save_pretrained does the same.
    once = {name: tensor for i, (name, tensor) in enumerate(random.items())
            if not any(tensor is other for other in list(random.values())[:i])}
    save_tensors(once, f"{directory}/hf/model.safetensors")
    shards = {f"model-0000{part}-of-00002.safetensors": dict(list(once.items())[part - 1 :: 2]) for part in (1, 2)}
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for file, tensors in shards.items():
        save_tensors(tensors, f"{directory}/sharded/{file}")
        index["weight_map"].update(dict.fromkeys(tensors, file))
    with open(f"{directory}/sharded/model.safetensors.index.json", "w") as out:
        json.dump(index, out)


def run(model, inputs, output):
    module = torch.export.load(model).module()
    with torch.no_grad():
        save_tensors({"output.0": computed(module, load_tensors(inputs)["args.0"])}, output)


def write_state(model, path):
    state = torch.export.load(model).state_dict
    save_tensors({name: tensor.detach().clone() for name, tensor in state.items()}, path)


def write_models(directory):
    """classes: dropout, exported for evaluation. squares, and own_loss, whose output is the loss of the same."""

    class Classes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 8)
            self.drop = torch.nn.Dropout(0.5)
            self.second = torch.nn.Linear(8, 5)

        def forward(self, x):
            return self.second(self.drop(torch.relu(self.first(x))))

    class OwnLoss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return (self.model(x) - y).square().mean()

    torch.manual_seed(0)
    rows = {0: torch.export.Dim("rows")}
    x, y = torch.randn(13, 4), torch.randn(13, 2)
    squares = torch.nn.Linear(4, 2)
    for name, model, args, dynamic in (("classes", Classes().eval(), (x,), (rows,)), ("squares", squares, (x,), (rows,)),
                                       ("own_loss", OwnLoss(squares), (x, y), (rows, rows))):
        torch.export.save(torch.export.export(model, args, dynamic_shapes=dynamic), f"{directory}/{name}.pt2")
    save_tensors({"args.0": x, "target": y}, f"{directory}/squares-0.safetensors")
    save_tensors({"args.0": x, "args.1": y}, f"{directory}/own_loss-0.safetensors")
    for i, count in enumerate((13, 5)):
        target = torch.randint(5, (count,))
        target[0] = -100
        save_tensors({"args.0": torch.randn(count, 4), "target": target}, f"{directory}/classes-{i}.safetensors")


def evaluate(model, loss, *files):
    module = torch.export.load(model).module()
    outputs, targets = [], []
    with torch.no_grad():
        for file in files:
            tensors = load_tensors(file)
            # A model that was exported with static shapes takes these.
            outputs.append(computed(module, tensors["args.0"]) if "tied" in model or "trained" in model
                           else module(tensors["args.0"]))
            targets.append(tensors["target"])
    output, target = torch.cat(outputs), torch.cat(targets)
    if loss == "mse":
        print(json.dumps({"loss": torch.nn.functional.mse_loss(output, target).item()}))
        return
    counted = target != -100
    mean = torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()).item()
    right = (output.argmax(-1) == target)[counted].sum().item()
    print(json.dumps({"loss": mean, "accuracy": right / counted.sum().item(), "perplexity": math.exp(mean)}))


if __name__ == "__main__":
    commands = {"data": write_data, "weights": write_weights, "run": run, "state": write_state,
                "models": write_models, "eval": evaluate}
    commands[sys.argv[1]](*sys.argv[2:])
