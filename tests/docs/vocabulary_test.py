"""Finds words in tracked files that have a better-known term in PyTorch, gloo or the papers, and comments that are not
sentences.

    python3 tests/docs/vocabulary_test.py            # the test
    python3 tests/docs/vocabulary_test.py --count    # the number of findings in each folder
"""

import collections
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SELF = Path(__file__).resolve()

# Files with text that people write. Recorded data and pictures are not.
TEXT = {".c", ".cc", ".cmake", ".cu", ".h", ".html", ".in", ".md", ".mjs", ".py", ".pyi", ".sh", ".toml", ".txt", ".yml"}
DATA = re.compile(r"^tests/fuzz/corpus/|^docs/pictures/|^penstock/transport/gloo_headers/|^LICENSE")

# Patterns and the terms to use in their place. A pattern has one meaning only, so that every match is a finding.
WORDS = {
    r"\b(each|every|this|that|which|other|another|schedule|tensor|transport|stage|program|runtime|train|cli)('s)? rooms?\b":
        "layer, or folder",
    r"\brooms? (of|in) (design|penstock/|the (table|tree|library))": "layer, or folder",
    r"\bbit[- ]equal\b|\bto the bit\b|\bbit for bit\b": "bitwise identical",
    r"\b(beside|against|than|as|of|from|with) the peer\b(?! rank)|\bthe peer('s| has| does| gives| refuses| gets)\b":
        "torch.distributed.pipelining, or PyTorch; a peer is a remote rank",
    r"\breckon(s|ed|ing)?\b": "estimate, simulate or compute",
    r"\bverdicts?\b": "abort reason",
    r"\blast words\b": "failure notification",
    r"\b(take|takes|took|taken|taking) back\b": "roll back, rollback",
    r"\bspeakers?\b|\bspeaks\(": "representative, coordinator",
    r"\bholders\b": "owners",
    r"\baside[ _-]?files?\b|\bAsideFile": "AtomicFileWriter",
    r"\bOutbox|\boutbox(es)?\b": "SendQueue",
    r"\bInbox|\binbox(es)?\b": "ReceiveQueue",
    r"\bLearnt\b": "ShapeCache",
    r"\bUnsaid\b": "Unknown",
    r"\bkYes\b": "kSuccess",
    r"\bkNo\b": "kCheckFailed",
    r"\bkBadUse\b": "kUsageError",
    r"\branks (that|which) are (threads|processes)\b": "thread ranks, process ranks",
    r"\bnot there any ?more\b": "connection lost, or does not exist",
    r"\bbehind step\b": "after step",
    r"\bbeside the run\b": "in the run directory",
    r"\bfolder of the run\b": "run directory",
    r"\b(go|goes|going|went) on from\b": "resume from, continue from",
    r"\babandon(s|ed|ing|ment)?\b": "cancel",
    r"(?<!by )(?<!one )\bhand(s|ed|ing)? (on|over|in)\b(?! hand)": "forward, send, pass or add",
    r"\bdoubtful\b": "ambiguous alias",
    r"\bbonds?\b": "colocation constraint",
    r"\bkept bytes\b|\bbytes[_ ]kept\b": "saved activation bytes, activation_bytes",
    r"\bwho waits for whom\b": "stall attribution",
    r"\bway of a batch\b": "life of a batch",
    r"\b(whole|split) run of the (model|program)\b": "reference run",
    r"\bpages? to zoom in\b": "interactive timeline",
    r"\bin a circle\b": "in a cycle",
    r"\blook-ahead of shards\b": "unshard lookahead",
}

# A comment that begins with these words is a fragment, unless it is one of SENTENCES.
FRAGMENT = re.compile(r"^ *// (Of|By|Whether|What|Those|Who|How|Also) ")
FRAGMENT_ADVICE = 'a sentence with subject and verb, such as "Returns …" or "Number of …"'
SENTENCES = (
    "// By default, ",
    "// By then ",
)

PATTERNS = [(re.compile(pattern, re.IGNORECASE if pattern.islower() else 0), term) for pattern, term in WORDS.items()]


def previous_is_comment(lines, index):
    """Returns True if the line before continues into this one as the same comment."""
    return index > 0 and bool(re.match(r"^ *// \S", lines[index - 1]))


def findings_in(text, name):
    """Yields a message for each finding in the text of a file."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        for pattern, term in PATTERNS:
            match = pattern.search(line)
            if match:
                yield f"{name}:{index + 1}: '{match[0]}'; write: {term}."
        fragment = FRAGMENT.match(line)
        if fragment and not previous_is_comment(lines, index) and not line.lstrip().startswith(SENTENCES):
            yield f"{name}:{index + 1}: the comment begins with '{fragment[1]}'; write: {FRAGMENT_ADVICE}."


def is_text(path, name):
    if DATA.search(name) or path == SELF or path.is_symlink() or not path.is_file():
        return False
    if path.suffix in TEXT or path.name == "Makefile":
        return True
    return path.suffix == "" and name.startswith("scripts/")


def findings(root):
    """Returns a message for each finding in the tracked files below root, or None without git."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    messages = []
    for name in sorted(filter(None, listed.decode().split("\0"))):
        if is_text(root / name, name):
            messages += findings_in((root / name).read_text(encoding="utf-8", errors="replace"), name)
    return messages


class Vocabulary(unittest.TestCase):
    def test_files_use_the_terms_of_the_field(self):
        messages = findings(ROOT)
        if messages is None:
            self.skipTest("not a git checkout")
        if messages:
            self.fail("\n" + "\n".join(messages))


class Rules(unittest.TestCase):
    """Tests the rules on texts that break them."""

    def assert_reported(self, text, *parts):
        messages = list(findings_in(text, "notes.md"))
        self.assertEqual(len(messages), 1, (text, messages))
        for part in parts:
            self.assertIn(part, messages[0])

    def test_each_word_is_reported_with_place_and_term(self):
        self.assert_reported("first\nLosses are bit-equal.\n", "notes.md:2: 'bit-equal'", "write: bitwise identical")
        for text in (
            "equal to the bit", "faster than the peer", "what is reckoned", "the verdict", "its last words", "taken back",
            "the speakers", "class AsideFile", "an aside file", "Outbox& outbox", "return kNo;", "ranks that are threads",
            "rank 1 is not there any more", "behind step 7", "it goes on from a checkpoint", "an abandoned run",
            "handed over", "a doubtful view", "a bond", "kept bytes", "Who waits for whom", "each room", "this room's",
        ):
            with self.subTest(text):
                self.assert_reported(text, "write: ")

    def test_other_meanings_are_not_reported(self):
        for text in (
            "a receive from the peer rank", "the peer closed the connection", "room for a label", "bit 3 equals",
            "on the one hand", "a stakeholder", "the placeholders", "by hand in the test", "UnsaidThings",
        ):
            with self.subTest(text):
                self.assertEqual(list(findings_in(text, "notes.md")), [])

    def test_a_comment_that_is_a_fragment_is_reported(self):
        self.assert_reported("  // Of the last stage.\n", "begins with 'Of'", "Number of")
        self.assert_reported("int a;\n// Whether it runs.\n", "notes.md:2", "begins with 'Whether'")

    def test_a_later_line_of_a_comment_may_begin_with_any_word(self):
        self.assertEqual(list(findings_in("// Returns the name\n// Of the rose.\n", "a.h")), [])
        self.assertEqual(list(findings_in("// By default, nothing.\n", "a.h")), [])


def count_by_folder():
    folders = collections.Counter()
    for message in findings(ROOT) or []:
        parts = message.split(":")[0].split("/")
        folders["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += 1
    for folder, count in folders.most_common():
        print(f"{count:5} {folder}")


if __name__ == "__main__":
    if "--count" in sys.argv:
        count_by_folder()
    else:
        unittest.main()
