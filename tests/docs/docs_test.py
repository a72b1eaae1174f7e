"""What the documents show is what there is: code blocks are files that compile, commands print what is printed there."""

import os
import pathlib
import re
import shlex
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


class Documents(unittest.TestCase):
    def test_programs_are_examples_that_the_build_compiles(self):
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.cc")]
        for path in DOCUMENTS:
            for block in blocks(path, "cpp"):
                if "int main()" in block:
                    self.assertIn(block, examples, f"{path.name} shows a program that is no file of examples/")

    def test_commands_print_what_is_shown(self):
        shown = 0
        for path in DOCUMENTS:
            for block in blocks(path, ""):
                command, _, output = block.partition("\n")
                if not command.startswith("$ ") or "--csv" in command:
                    continue
                words = shlex.split(command[2:])
                self.assertEqual(os.path.basename(words[0]), "penstock")
                result = subprocess.run([os.environ["PENSTOCK"], *words[1:]], capture_output=True, text=True, timeout=60)
                # An ellipsis stands for lines that are left out.
                for piece in output.split("…\n"):
                    self.assertIn(piece, result.stdout, f"{path.name}: {command}")
                shown += 1
        self.assertGreater(shown, 0)

    def test_links_lead_somewhere(self):
        for path in DOCUMENTS:
            for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
                self.assertTrue((path.parent / target).exists(), f"{path.name} links to {target}")


if __name__ == "__main__":
    unittest.main()
