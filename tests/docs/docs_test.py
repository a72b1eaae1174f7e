"""Checks the documents: code blocks are examples that compile, quoted commands print the quoted output, pictures are current."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

os.environ["PENSTOCK"] = os.path.abspath(os.environ["PENSTOCK"])
ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    """Returns the fenced code blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def penstock(*words, **options):
    return subprocess.run([os.environ["PENSTOCK"], *words], capture_output=True, text=True, timeout=60, **options)


class Pictures(unittest.TestCase):
    def test_the_picture_above_each_generator_is_its_schedule(self):
        sources = sorted((ROOT / "penstock" / "schedule" / "generators").glob("*.cc"))
        names = {line.split()[0] for line in penstock("schedule", "list").stdout.splitlines()}
        for path in sources:
            text = path.read_text()
            name = re.match(r"// (\w+): ", text).group(1)
            rows = re.findall(r"^//   (rank \d+ \| .*)$", text, flags=re.MULTILINE)
            microbatches = 1 + max(int(number) for number in re.findall(r"\d[FIWB](\d+)", " ".join(rows)))
            shown = penstock("schedule", "show", name, "--ranks", str(len(rows)), "--microbatches", str(microbatches))
            self.assertEqual([row for row in shown.stdout.splitlines() if row.startswith("rank")], rows, path.name)
            names.remove(name)
        self.assertEqual(names, set(), "schedules without a picture")

    def test_pictures_of_the_documents_are_current(self):
        shown = (ROOT / "docs" / "schedules.md").read_text()
        for line in penstock("schedule", "list").stdout.splitlines():
            name = line.split()[0]
            self.assertIn(f"(pictures/{name}.svg)", shown)
            words = ["schedule", "show", name, "--ranks", "4", "--microbatches", "8"]
            # With two stages per rank, each stage is half as much work.
            if "8 stages" in penstock(*words).stdout:
                words += ["--forward", "0.5", "--input", "0.5", "--weight", "0.5"]
            shown_now = penstock(*words, "--format", "svg")
            self.assertEqual(shown_now.returncode, 0, shown_now.stderr)
            drawn = shown_now.stdout
            path = ROOT / "docs" / "pictures" / f"{name}.svg"
            if os.environ.get("PENSTOCK_DRAW"):
                path.write_text(drawn)
            self.assertEqual(path.read_text(), drawn, f"{path.name} is out of date; PENSTOCK_DRAW=1 draws it")


    def test_the_chart_shows_the_ratios_of_the_benchmarks(self):
        path = ROOT / "docs" / "pictures" / "benchmarks.svg"
        with tempfile.TemporaryDirectory() as folder:
            drawn = pathlib.Path(folder, "chart.svg")
            command = [sys.executable, ROOT / "bench" / "chart.py", ROOT / "docs" / "benchmarks.md", "-o", drawn]
            subprocess.run(command, check=True, timeout=60)
            if os.environ.get("PENSTOCK_DRAW"):
                path.write_text(drawn.read_text())
            self.assertEqual(path.read_text(), drawn.read_text(), "the ratios have changed; PENSTOCK_DRAW=1 draws the chart")


class Documents(unittest.TestCase):
    def test_programs_are_examples_that_the_build_compiles(self):
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.cc")]
        for path in DOCUMENTS:
            for block in blocks(path, "cpp"):
                if "int main()" in block:
                    self.assertIn(block, examples, f"{path.name} shows a program that is not a file of examples/")

    def test_the_tutorial_shows_parts_of_examples(self):
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.cc")]
        parts = blocks(ROOT / "docs" / "tutorial.md", "cpp")
        self.assertTrue(parts)
        for block in parts:
            self.assertTrue(any(block in example for example in examples), f"no example contains\n{block}")

    def test_commands_print_the_quoted_output(self):
        shown = 0
        for path in DOCUMENTS:
            for block in blocks(path, ""):
                command, _, output = block.partition("\n")
                if not command.startswith("$ "):
                    continue
                words = shlex.split(command[2:])
                self.assertEqual(os.path.basename(words[0]), "penstock")
                with tempfile.TemporaryDirectory() as folder:
                    # The file that docs/schedules.md verifies.
                    pathlib.Path(folder, "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
                    result = penstock(*words[1:], cwd=folder)
                # An ellipsis stands for omitted lines.
                for piece in output.split("…\n"):
                    self.assertIn(piece, result.stdout, f"{path.name}: {command}")
                shown += 1
        self.assertGreater(shown, 1)

    def test_links_lead_somewhere(self):
        for path in DOCUMENTS:
            text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)#:]+)\)", text):
                self.assertTrue((path.parent / target).exists(), f"{path.name} links to {target}")


if __name__ == "__main__":
    unittest.main()
