"""A zoo of exported models, with the results of eager PyTorch, for the tests of penstock/program.

    zoo.py write DIR [--only NAME …]

exporting.py says what is written.
"""

import sys

import exporting
import zoo_cuts  # noqa: F401
import zoo_forms  # noqa: F401
import zoo_networks  # noqa: F401
from zoo_entries import ZOO

if __name__ == "__main__":
    sys.exit(exporting.main(__doc__, ZOO))
