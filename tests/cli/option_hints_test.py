"""Checks that the library still gives each piece of advice that penstock/cli/option_hints.cc adds an option to."""

import pathlib
import re
import unittest

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "penstock"


def library_literals():
    """Returns the sources of the library below the command, with adjacent string literals joined."""
    paths = [path for path in SOURCES.rglob("*.cc") if path.relative_to(SOURCES).parts[0] != "cli"]
    return re.sub(r'"\s*"', "", "".join(path.read_text() for path in sorted(paths)))


class OptionHints(unittest.TestCase):
    def test_every_piece_of_advice_is_given_by_the_library(self):
        rows = re.findall(r'\{"([^"]+)", "--[^"]+"\}', (SOURCES / "cli/option_hints.cc").read_text())
        self.assertGreater(len(rows), 1)
        literals = library_literals()
        self.assertEqual([advice for advice in rows if advice not in literals], [])

    def test_the_library_names_no_options(self):
        self.assertEqual(re.findall(r'Hint:[^"]* --[a-z][^"]*', library_literals()), [])


if __name__ == "__main__":
    unittest.main()
