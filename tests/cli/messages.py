"""What the tests of the command leave out of what it prints."""

import re


def without_waiting(text):
    """Without the lines about ranks that take a while to start, as they may on a busy machine."""
    return re.sub(r"^penstock: rank \d+ waits for .*\n", "", text, flags=re.M)
