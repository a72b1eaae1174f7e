"""Where the files of the zoo put their models."""

import torch
from exporting import Entry
from torch.export import Dim

ZOO: dict[str, Entry] = {}

BATCH = Dim("batch")


def entry(name, inputs, cuts, **options):
    """Puts the class or function that makes a model into the zoo. It may be there under several names."""

    def put(model):
        assert name not in ZOO
        ZOO[name] = Entry(model, inputs, cuts, **options)
        return model

    return put


def features(*shape):
    """Inputs of models that take one tensor."""
    return lambda: ((torch.randn(*shape),), {})


def tokens(rows=2, length=6):
    return (torch.randint(0, 32, (rows, length)),), {}
