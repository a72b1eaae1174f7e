"""Asks torch.nn.attention.flex_attention  for masks and attention, and writes them down for our tests.

    attention_reference.py OUTDIR [--seed N]

Nothing is kept in the repository: the answers are made when the tests run, by the version that is installed. Both files
are lists of dicts, written by torch.save:

    masks.pt       a mask's make, all its fields, its printed form, parts of it by index, and its chunks
    attention.pt   query, key and value, what to do with them, and the result

A mask's make is `allowed`, a bool tensor [batch, heads, queries, keys] that its function looks answers up in, or the
name of a rule and a number for it.
"""

import argparse
import os
import pathlib
import random
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
# Virtual machines show AMX and do not let it be used: a product in bfloat16 then ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch.distributed.pipelining.microbatch import _split_block_mask
from torch.nn.attention import flex_attention as reference

# Else it compiles its reference for each call. The numbers are the same.
reference._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def causal(b, h, q, kv):
    return q >= kv


def window(width):
    return lambda b, h, q, kv: (q >= kv) & (q - kv < width)


def looked_up(allowed):
    return lambda b, h, q, kv: allowed[b, h, q, kv]


def fields(mask):
    return {name: getattr(mask, name) for name in FIELDS}


def patchwork(generator, batch, heads, q_len, kv_len, block):
    """A mask of blocks that are empty, full or anything, so that each kind is met."""
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    kind = torch.randint(0, 3, (batch, heads, rows, columns), generator=generator)
    kind = kind.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :q_len, :kv_len]
    noise = torch.rand(kind.shape, generator=generator) < generator_choice(generator, (0.02, 0.5, 0.98))
    return (kind == 2) | ((kind == 1) & noise)


def generator_choice(generator, choices):
    return choices[torch.randint(0, len(choices), (), generator=generator).item()]


def documents(generator, batch, length):
    ids = torch.zeros(batch, length, dtype=torch.int64)
    for row in ids:
        for cut in torch.randint(0, length, (4,), generator=generator).tolist():
            row[cut:] += 1
    return ids


def parts_by_index(mask, random_source):
    """Some indices, as (kind, numbers) for each dimension, and the fields of what is there."""
    batch, heads, rows = mask.kv_num_blocks.shape
    parts = []
    for _ in range(3):
        index, words = [], []
        for size in (batch, heads, rows)[: random_source.randint(1, 3)]:
            kind = random_source.choice(("integer", "slice", "tensor"))
            if kind == "integer":
                numbers = [random_source.randrange(-size, size)]
                index.append(numbers[0])
            elif kind == "slice":
                start = random_source.randrange(size)
                numbers = [start, random_source.randint(start + 1, size), random_source.randint(1, 2)]
                index.append(slice(*numbers))
            else:
                numbers = [random_source.randrange(size)]
                index.append(torch.tensor(numbers))
            words.append([kind, *map(str, numbers)])
        # PyTorch gives indices together to one tensor; several of them would be paired, and not crossed.
        if sum(word[0] == "tensor" for word in words) > 1:
            continue
        parts.append({"index": words, "fields": fields(mask[tuple(index)])})
    return parts


def chunks_of(mask, random_source):
    batch, heads = mask.kv_num_blocks.shape[:2]
    if batch == 1:
        return []  # the mask itself
    chunks = _split_block_mask(mask, random_source.randint(1, batch))
    return [
        {
            "fields": fields(chunk),
            "allowed": reference.create_mask(chunk.mask_mod, chunk.kv_num_blocks.size(0), heads, *chunk.seq_lengths, "cpu"),
        }
        for chunk in chunks
    ]


def mask_case(random_source, rule, argument, mask_mod, batch, heads, q_len, kv_len, block):
    mask = reference.create_block_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block)
    sizes = mask.kv_num_blocks.shape
    return {
        "rule": rule,
        "argument": argument,
        "sizes": [sizes[0], sizes[1], q_len, kv_len, *block],
        "fields": fields(mask),
        "dense": mask.to_dense(),
        "sparsity": mask.sparsity(),
        # More pictures than four end in a sentence of its own.
        "text": str(mask) if sizes[0] * sizes[1] <= 4 else "",
        "parts": parts_by_index(mask, random_source),
        "chunks": chunks_of(mask, random_source),
    }


def mask_cases(random_source, generator):
    blocks = ((1, 1), (4, 4), (8, 8), (16, 16), (8, 16), (16, 4), (7, 5), (128, 128))
    for _ in range(300):
        batch, heads = random_source.randint(1, 5), random_source.randint(1, 3)
        q_len, kv_len = random_source.randint(1, 60), random_source.randint(1, 60)
        block = random_source.choice(blocks)
        allowed = patchwork(generator, batch, heads, q_len, kv_len, block)
        yield mask_case(random_source, "allowed", allowed, looked_up(allowed), batch, heads, q_len, kv_len, block)
    for length in (1, 127, 128, 129, 500, 1024, 3000):
        size = (None, None, length, length, (128, 128))
        yield mask_case(random_source, "causal", torch.tensor(0), causal, *size)
        yield mask_case(random_source, "window", torch.tensor(200), window(200), *size)
    for batch in (2, 3, 5, 7):
        ids = documents(generator, batch, 300)
        allowed = (ids[:, None, :, None] == ids[:, None, None, :]).expand(batch, 2, 300, 300).contiguous()
        yield mask_case(random_source, "allowed", allowed, looked_up(allowed), batch, 2, 300, 300, (64, 64))


def alibi(heads):
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def soft_cap(score, b, h, q, kv):
    return 2 * torch.tanh(score / 2)


def attention_cases(generator):
    # batch, heads of the query and of the key, lengths, sizes
    shapes = (
        (1, 2, 2, 128, 128, 16, 16),
        (2, 4, 2, 100, 100, 8, 24),
        (3, 2, 1, 77, 150, 16, 8),
        (2, 3, 3, 300, 200, 8, 8),
    )
    for batch, heads, kv_heads, q_len, kv_len, size, value_size in shapes:
        allowed_kinds = {
            "none": None,
            "causal": torch.ones(1, 1, q_len, kv_len).tril().bool(),
            "window": torch.ones(1, 1, q_len, kv_len).tril().triu(-40).bool(),
            "patchwork": patchwork(generator, batch, heads, q_len, kv_len, (32, 32)),
            # Rows with nothing to attend to.
            "sparse": torch.rand((batch, 1, q_len, kv_len), generator=generator) < 0.01,
        }
        for kind, allowed in allowed_kinds.items():
            for modification in ("none", "alibi", "soft_cap"):
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    if dtype != torch.float64 and modification == "alibi":
                        continue
                    query, key, value = (
                        torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)
                        for sizes in (
                            (batch, heads, q_len, size),
                            (batch, kv_heads, kv_len, size),
                            (batch, kv_heads, kv_len, value_size),
                        )
                    )
                    mask = None
                    if allowed is not None:
                        mask = reference.create_block_mask(
                            looked_up(allowed), *allowed.shape[:2], q_len, kv_len, device="cpu", BLOCK_SIZE=32
                        )
                        # It asks for the query's own row and head, also when the mask has one.
                        whole = allowed.expand(batch, heads, q_len, kv_len)
                        mask.mask_mod = looked_up(whole)
                    score_mod = {"none": None, "alibi": alibi(heads), "soft_cap": soft_cap}[modification]
                    scale = 0.3 if kind == "window" else None
                    out = reference.flex_attention(
                        query, key, value, score_mod, mask, scale=scale, enable_gqa=heads != kv_heads
                    )
                    yield {
                        "name": f"{kind} {modification} {dtype} {tuple(query.shape)} {tuple(key.shape)}",
                        "query": query,
                        "key": key,
                        "value": value,
                        "allowed": allowed,
                        "score_mod": modification,
                        "scale": scale,
                        "out": out,
                    }


def main():
    arguments = argparse.ArgumentParser(description="Writes PyTorch's block masks and attention for our tests.")
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    random_source = random.Random(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        torch.save(list(mask_cases(random_source, generator)), options.folder / "masks.pt")
        torch.save(list(attention_cases(generator)), options.folder / "attention.pt")


if __name__ == "__main__":
    main()
