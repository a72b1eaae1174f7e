"""The list of models, to which the files of the zoo add theirs."""

import torch
from exporting import Entry
from torch.export import Dim

ZOO: dict[str, Entry] = {}

BATCH = Dim("batch")


def entry(name, inputs, cuts, **options):
    """Adds the class or function that makes a model to the zoo. It may be added under several names."""

    def put(model):
        assert name not in ZOO
        ZOO[name] = Entry(model, inputs, cuts, **options)
        return model

    return put


def features(*shape):
    """Returns the inputs of a model that takes one tensor."""
    return lambda: ((torch.randn(*shape),), {})


def tokens(rows=2, length=6):
    return (torch.randint(0, 32, (rows, length)),), {}
