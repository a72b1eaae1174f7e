"""Runs the penstock command in a temporary directory. PENSTOCK names the command."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PENSTOCK = os.path.abspath(os.environ["PENSTOCK"])


def without_waiting(text):
    """Removes the lines about ranks that take a while to start, as they may on a busy machine."""
    return re.sub(r"^penstock: rank \d+ waits for .*\n", "", text, flags=re.M)


def penstock(*words, environment=None, **options):
    """Runs the command to its end, and returns its exit code, output and errors."""
    result = subprocess.run([PENSTOCK, *map(str, words)], capture_output=True, text=True, timeout=300,
                            env={**os.environ, **(environment or {})}, **options)
    result.stderr = without_waiting(result.stderr)
    return result


class CommandCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def path(self, name):
        return str(self.folder / name)

    def penstock(self, *words, code=0, environment=None):
        result = penstock(*words, environment=environment, cwd=self.folder)
        self.assertEqual(result.returncode, code, (words, result.stdout, result.stderr))
        return result

    def answers(self, *words, code=0):
        """The command prints no error. Returns its output."""
        result = self.penstock(*words, code=code)
        self.assertEqual(result.stderr, "", words)
        return result.stdout

    def refuses(self, *words, message):
        """The command prints nothing but an error. Returns the error."""
        result = self.penstock(*words, code=2)
        self.assertEqual(result.stdout, "", words)
        self.assertIn(message, result.stderr)
        return result.stderr
