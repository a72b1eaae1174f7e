"""Scenarios of the fault tests: training runs and exports, each with its initial state and with the conditions that must hold
afterwards. PENSTOCK_PROGRAMS names the directory that tests/program/models.py has written; without it, the export of an
exported model is left out."""

import json
import os
import pathlib
import random
import re
import shutil
import struct
import zlib

from injection import run

STEPS = 3
KEEP = 2
MODEL = ["--digits", 1, "--rows", 8, "--layers", 1, "--width", 16, "--heads", 2, "--ranks", 1, "--optimizer", "sgd"]
SAVING = ["train", *MODEL, "--checkpoint", "ck", "--checkpoint-every", 1, "--output", "run"]
TRAIN = [*SAVING, "--keep", KEEP]

# Names that no run may leave behind: files and checkpoints that were not finished, removed checkpoints, and locks.
LEFTOVER = re.compile(r"\.part\d*$|^\.unfinished-|^\.removed-|^\.penstock-")


def must_run(folder, *words):
    result = run(folder, words)
    if result.code != 0:
        raise RuntimeError(f"{words} failed without a fault: {result.stderr}")
    return result


def losses_in(folder):
    """Returns the losses by step, as text, so that they compare bit by bit."""
    try:
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"].hex() for line in map(json.loads, lines) if "loss" in line}
    except (OSError, ValueError):
        return {}


def checkpoints_in(folder):
    """Returns the directories of checkpoints by step."""
    found = {int(path.name[len("step-"):]): path for path in (folder / "ck").glob("step-*")}
    return dict(sorted(found.items()))


def is_complete(checkpoint):
    """Checks the sizes and checksums of a checkpoint's files without the command."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        contents = [(file, (checkpoint / file["name"]).read_bytes()) for file in files]
    except (OSError, ValueError, KeyError):
        return False
    return all(len(content) == file["bytes"] and zlib.crc32(content) == file["crc32"] for file, content in contents)


def leftovers_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if LEFTOVER.search(path.name))


def content_of(path):
    return path.read_bytes() if path.exists() else None


class Training:
    """A training run that is resumed after a fault, and then must have the losses of a run without faults."""

    words = [*TRAIN, "--steps", STEPS]

    def __init__(self, folder):
        self.template = folder
        self.template.mkdir()
        self.saved_before = 0
        self.prepare()

    def prepare(self):
        reference = self.template.with_name(self.template.name + "-reference")
        reference.mkdir()
        must_run(reference, *self.words)
        self.losses = losses_in(reference)

    def problems_after(self, folder, result):
        """Yields what is wrong after a run, and resumes it. The problem "lost checkpoint" is one of them."""
        reported = [int(step) for step in re.findall(r"^step (\d+): checkpoint ", result.stdout, re.M)]
        saved = max([self.saved_before, *reported])
        for checkpoint in checkpoints_in(folder).values():
            if not is_complete(checkpoint):
                yield "a checkpoint is damaged"
        if result.code == 0:
            yield from self.problems_of_success(folder)
        expected = self.expected_losses(folder, reported)
        if expected is None:
            yield "lost checkpoint: the old run's is newer than the one that was reported"
            return
        yield from self.problems_of_resuming(folder, saved, expected)

    def problems_of_success(self, folder):
        if losses_in(folder) != self.losses:
            yield "a run that succeeded has other losses than a run without faults"
        if list(checkpoints_in(folder)) != list(range(STEPS - KEEP + 1, STEPS + 1)):
            yield f"a run that succeeded has not kept {KEEP} checkpoints"
        if not (content_of(folder / "run/timeline.html") or b"").rstrip().endswith(b"</html>"):
            yield "a run that succeeded has not written its timeline"
        try:
            json.loads((folder / "run/config.json").read_text())
        except (OSError, ValueError):
            yield "a run that succeeded has not written its configuration"

    def expected_losses(self, folder, reported):
        """Returns the losses that the resumed run has to end with; None if it would resume from a wrong checkpoint."""
        del folder, reported
        return self.losses

    def problems_of_resuming(self, folder, saved, expected):
        words = [word for word in self.words if word not in ("--overwrite", "--resume")]
        resumed = run(folder, [*words, "--resume"])
        if resumed.code != 0:
            yield f"the resumed run fails: {resumed.stderr.splitlines()[:1]}"
            return
        found = re.search(r"^resuming after step (\d+)$|^nothing to do: step (\d+)", resumed.stdout, re.M)
        resumed_from = int(found[1] or found[2]) if found else 0
        if resumed_from < saved:
            yield f"lost checkpoint: step {saved} was saved, and the run resumes from step {resumed_from}"
        if losses_in(folder) != expected:
            yield "the resumed run has other losses than a run without faults"
        for name in leftovers_in(folder):
            yield "the resumed run leaves " + name


class Fresh(Training):
    """A run in an empty directory."""

    name = "train"


class Resumed(Training):
    """A run that is resumed from its last but one checkpoint, with the leftovers of one that was killed."""

    name = "resume"
    words = [*TRAIN, "--steps", STEPS, "--resume"]

    def prepare(self):
        must_run(self.template, *SAVING, "--steps", STEPS, "--keep", STEPS - 1)
        self.losses = losses_in(self.template)
        self.saved_before = STEPS - 1
        killed = self.template / f"ck/step-{STEPS:08}"
        killed.rename(killed.with_name(".unfinished-" + killed.name))

    def problems_after(self, folder, result):
        has_begun = "microbatches\n" in result.stdout
        if has_begun and f"resuming after step {self.saved_before}\n" not in result.stdout:
            yield f"lost checkpoint: the run does not resume from step {self.saved_before}"
        yield from super().problems_after(folder, result)


class Overwritten(Training):
    """A run that removes a longer one, with other losses, once its first step has succeeded."""

    name = "overwrite"
    words = [*TRAIN, "--steps", STEPS, "--overwrite"]
    OLD_STEPS = STEPS + 1

    def prepare(self):
        super().prepare()
        must_run(self.template, *TRAIN, "--steps", self.OLD_STEPS, "--seed", 1)
        self.old_manifests = {(path / "manifest.json").read_bytes() for path in checkpoints_in(self.template).values()}
        continued = self.template.with_name(self.template.name + "-continued")
        shutil.copytree(self.template, continued)
        must_run(continued, *TRAIN, "--steps", STEPS, "--resume")
        self.old_losses = losses_in(continued)

    def expected_losses(self, folder, reported):
        newest = list(checkpoints_in(folder).values())[-1:]
        if not newest or content_of(newest[0] / "manifest.json") not in self.old_manifests:
            return self.losses
        return None if reported else self.old_losses


class Export:
    """An export over a file of an earlier one."""

    name = "export"
    target = "model.safetensors"
    words = ["export", "ck", "-o", target]

    def __init__(self, folder):
        self.template = folder
        self.template.mkdir()
        self.prepare()
        self.before = content_of(self.template / self.target)
        exported = self.template.with_name(self.template.name + "-exported")
        shutil.copytree(self.template, exported)
        must_run(exported, *self.words)
        self.after = content_of(exported / self.target)

    def prepare(self):
        must_run(self.template, *TRAIN, "--steps", 2)
        must_run(self.template, "export", "ck/step-00000001", "-o", self.target)

    def problems_after(self, folder, result):
        """Yields what is wrong after an export, and repeats it."""
        found = content_of(folder / self.target)
        if found not in (self.before, self.after):
            yield "the exported file is neither the old one nor the new one"
        if result.code == 0 and found != self.after:
            yield "an export that succeeded has not written its file"
        for checkpoint in checkpoints_in(folder).values():
            if not is_complete(checkpoint):
                yield "a checkpoint is damaged"
        repeated = run(folder, self.words)
        if repeated.code != 0 or content_of(folder / self.target) != self.after:
            yield f"the repeated export fails: {repeated.stderr.splitlines()[:1]}"
        for name in leftovers_in(folder):
            yield "the export leaves " + name


class ExportArchive(Export):
    """An export of a copy of the exported model to a new file."""

    name = "export --pt2"
    target = "trained.pt2"
    words = ["export", "ck", "--pt2", target, "--model", "pair.pt2"]

    def prepare(self):
        shutil.copy(pathlib.Path(os.environ["PENSTOCK_PROGRAMS"]) / "pair.pt2", self.template)
        (self.template / "data").mkdir()
        write_batch(self.template / "data/batch-0.safetensors", {"args.0": [12, 4], "target": [12, 2]})
        must_run(self.template, "train", "pair.pt2", "--data", "data", "--loss", "mse", "--microbatches", 4,
                 "--steps", 1, "--checkpoint", "ck", "--output", "run")


def write_batch(path, sizes_by_name):
    """Writes float32 tensors of random numbers as safetensors."""
    draw = random.Random(0)
    header, content = {}, b""
    for name, sizes in sizes_by_name.items():
        count = sizes[0] * sizes[1]
        values = struct.pack(f"<{count}f", *(draw.gauss(0, 1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [len(content), len(content) + len(values)]}
        content += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def scenarios():
    """Returns the scenarios that the environment has the files for."""
    return [Fresh, Resumed, Overwritten, Export] + ([ExportArchive] if "PENSTOCK_PROGRAMS" in os.environ else [])
