"""Draws the ratios that `make bench` printed as an SVG bar chart.

    make bench | tee bench.txt
    python3 bench/chart.py bench.txt -o docs/pictures/benchmarks.svg

Reads the tables of the benchmarks, also from a page that quotes them such as docs/benchmarks.md, takes the ratio of the rows
below and draws each as a bar on a logarithmic scale. Fails if a row is missing.
"""

import argparse
import math
import pathlib
import re
import sys
from xml.sax.saxutils import escape

# Caption of a bar, and the beginning of its row in the tables.
BARS = [
    ("Training step, compute-bound GPT, 2 thread ranks", "compute-bound: width 256"),
    ("Block-sparse attention forward (compiled flex_attention)", "flex_attention, compiled"),
    ("Step of 64 small microbatches, 1F1B, 2 processes", "1F1B, processes"),
    ("Splitting and merging a batch into 64 microbatches", "512x64 "),
    ("Step of 64 small microbatches, 1F1B, 2 thread ranks", "1F1B, threads"),
    ("Making and lowering Interleaved1F1B, 8 x 2 stages, 256", "8x2x256"),
]
RATIO = re.compile(r"  (\d+(?:\.\d+)?)x(?:  |$)")

WIDTH, LEFT, RIGHT, TOP, ROW = 900, 440, 60, 54, 34
COLOUR = "#3b6fd4"


def ratio_of(text, beginning):
    """Returns the ratio in the first row that begins so."""
    for line in text.splitlines():
        found = RATIO.search(line)
        if line.startswith(beginning) and found:
            return float(found[1])
    raise ValueError(f"no row begins with '{beginning.strip()}' and has a ratio.\n  Hint: run all of `make bench`.")


def draw(ratios):
    """Returns an SVG with a bar for each (caption, ratio)."""
    most = 10 ** math.ceil(math.log10(max(ratio for _, ratio in ratios)))
    height = TOP + ROW * len(ratios) + 30
    scale = (WIDTH - LEFT - RIGHT) / math.log10(most)

    def place(ratio):
        return LEFT + scale * max(0.0, math.log10(ratio))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        "<title>How many times as fast as torch.distributed.pipelining</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="15" font-weight="600" fill="#1c2430">'
        "How many times as fast as torch.distributed.pipelining (logarithmic)</text>",
    ]
    tick = 1
    while tick <= most:
        x = place(tick)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{height - 26}" stroke="#d7dce4"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - 9}" text-anchor="middle" fill="#5a6575">{tick}×</text>')
        tick *= 10
    for row, (caption, ratio) in enumerate(ratios):
        y = TOP + ROW * row
        lines.append(f'<text x="{LEFT - 12}" y="{y + 13}" text-anchor="end" fill="#1c2430">{escape(caption)}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(1.0, place(ratio) - LEFT):.1f}" height="18" rx="2" fill="{COLOUR}"/>'
        )
        lines.append(f'<text x="{place(ratio) + 8:.1f}" y="{y + 13}" fill="#1c2430">{ratio:g}×</text>')
    return "\n".join([*lines, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="output of `make bench`, or a page that quotes it")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="SVG to write")
    arguments = parser.parse_args()
    try:
        text = arguments.results.read_text(encoding="utf-8")
        picture = draw([(caption, ratio_of(text, beginning)) for caption, beginning in BARS])
        arguments.output.write_text(picture, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"chart.py: {error}")


if __name__ == "__main__":
    main()
