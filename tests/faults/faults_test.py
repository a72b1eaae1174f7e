"""Injects I/O faults into the command as SQLite's tests do: for each scenario and each kind of call, the first call
fails, then the second, and so on until a run makes fewer calls. After each fault the process has ended with a
readable error, and no partial file is treated as complete. See injection.py and scenarios.py.

A sample of the faults runs in under a minute; PENSTOCK_FAULTS_SEED=N draws another one.
PENSTOCK_FAULTS=all runs every fault, and PENSTOCK_FAULTS=SCENARIO every fault of one scenario.
PENSTOCK_FAULTS=SCENARIO:KIND:CALL:FORM[:ERRNO] runs one fault and shows what the command prints, as in
PENSTOCK_FAULTS=train:write:7:once:28.
"""

import collections
import concurrent.futures
import errno
import os
import pathlib
import random
import re
import shutil
import signal
import tempfile
import unittest

from injection import FORMS, FORMS_OF, KINDS, Fault, run, run_with
from scenarios import STEPS, Fresh, scenarios

SELECTED = os.environ.get("PENSTOCK_FAULTS", "")
IS_SAMPLE = SELECTED == ""
SEED = int(os.environ.get("PENSTOCK_FAULTS_SEED", 1))
WORKERS = os.cpu_count()
# Allocations are too many for each of them to fail.
SAMPLED_ALLOCATIONS = 30

# Texts of raw exceptions, which no message may contain.
RAW = re.compile(r"filesystem error|Success|terminate called|json\.exception|basic_\w+|std::|what\(\)|bad_alloc|c10::")
NAMED = re.compile(r"^penstock: \S*\b(ck|run|model\.safetensors|trained\.pt2|pair\.pt2|data)\b[^:\s]*: ", re.M)
# How oneDNN reports that it could not allocate: its message names the object but no reason.
ONEDNN = re.compile(r"could not create an? (engine|stream|memory|primitive)\b")
# Calls whose failure loses data, so that a run may not succeed silently.
LOSES_DATA = {"write", "fsync", "rename", "mkdir", "truncate"}

COLUMNS = ("faults", "exit 0", "exit 2", "aborts", "hangs", "lost checkpoints", "other problems")
table = collections.defaultdict(collections.Counter)


def problems_of_end(fault, result):
    """Yields what is wrong with the end of a run and with its message."""
    if result.code is None:
        yield "the run hangs"
    elif result.code == -signal.SIGABRT and fault.kind == "new":
        # Destructors and noexcept functions of libtorch and of nlohmann::json allocate. Files are checked all the same.
        return
    elif result.code not in (0, 2):
        name = signal.Signals(-result.code).name if result.code < 0 else f"exit code {result.code}"
        yield f"the run ends with {name}"
    elif result.code == 0:
        if fault.kind in LOSES_DATA and fault.errno != errno.EINTR:
            yield "the run succeeds silently"
    elif fault.kind == "short":
        yield "a short write is treated as an error"
    else:
        yield from problems_of_message(fault, result.stderr)


def problems_of_message(fault, message):
    if raw := RAW.search(message):
        yield f"the message has the text of a raw exception or of no error: '{raw[0]}'"
    if fault.kind == "new":
        if "not enough memory" not in message and not NAMED.search(message) and not ONEDNN.search(message):
            yield "the message does not name a reason"
        return
    if not NAMED.search(message):
        yield "the message does not begin with the file or directory"
    if os.strerror(fault.errno) not in message:
        yield f"the message does not contain the reason, '{os.strerror(fault.errno)}'"


class Outcome:
    """The outcome of one fault."""

    def __init__(self, scenario, fault):
        self.scenario = scenario
        self.fault = fault
        with tempfile.TemporaryDirectory() as parent:
            folder = pathlib.Path(parent).resolve() / "case"
            shutil.copytree(scenario.template, folder)
            self.result = run_with(fault, folder, scenario.words)
            self.reached = self.result.calls[fault.kind] >= fault.call
            self.problems = []
            if self.reached:
                self.problems += [*problems_of_end(fault, self.result), *scenario.problems_after(folder, self.result)]

    def count(self):
        counter = table[self.scenario.name, self.fault.kind]
        has_lost = any(problem.startswith("lost checkpoint") for problem in self.problems)
        has_ended = self.result.code in (0, 2)
        counter["faults"] += 1
        counter["exit 0"] += self.result.code == 0
        counter["exit 2"] += self.result.code == 2
        counter["hangs"] += self.result.code is None
        counter["aborts"] += not has_ended and self.result.code is not None
        counter["lost checkpoints"] += has_lost
        counter["other problems"] += bool(self.problems) and has_ended and not has_lost

    def selector(self):
        """Returns the value of PENSTOCK_FAULTS that repeats it."""
        fault = self.fault
        return f"{self.scenario.name}:{fault.kind}:{fault.call}:{fault.form}:{fault.errno}"

    def text(self):
        saved = "".join(re.findall(r"^step \d+: checkpoint .*\n", self.result.stdout, re.M))
        return (f"{self.selector()}, which failed {self.result.failed_call!r}, exit code {self.result.code}\n"
                + "".join(f"  {problem}\n" for problem in self.problems) + saved + f"stderr:\n{self.result.stderr}")


def without_numbers(text):
    return re.sub(r"\d+", "N", text)


def grouped(outcomes):
    """Describes the bad outcomes: for each distinct one, the first in full and the others by their selectors."""
    groups = collections.defaultdict(list)
    for outcome in outcomes:
        for problem in outcome.problems:
            groups[without_numbers(problem), without_numbers(outcome.result.failed_call)].append(outcome)
    text = ""
    for (problem, call), members in groups.items():
        others = " ".join(f"{member.fault.call}:{member.fault.form}" for member in members[1:])
        text += f"\n== {problem} [{call}], {len(members)} times\n{members[0].text()}"
        text += f"also: {others}\n" if others else ""
    return text


class Faults(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.random = random.Random(SEED)
        wanted = SELECTED.split(":")[0]
        cls.scenarios = [kind(pathlib.Path(cls.folder.name).resolve() / str(number))
                         for number, kind in enumerate(scenarios()) if wanted in ("", "all", kind.name)]

    def calls_to_fail(self, kind, count):
        """Returns the numbers of the calls to fail, out of those of a run without faults."""
        if kind == "new":
            return sorted(self.random.sample(range(1, count + 1), 1 if IS_SAMPLE else SAMPLED_ALLOCATIONS))
        if not IS_SAMPLE:
            return list(range(1, count + 1))
        return [self.random.randint(1, count)] if count > 0 else []

    def forms_of(self, kind):
        forms = FORMS_OF.get(kind, FORMS)
        return [self.random.choice(forms)] if IS_SAMPLE else forms

    def outcomes_of(self, scenario, kind, form, count, pool):
        faults = [Fault(kind, call, form, KINDS[kind]) for call in self.calls_to_fail(kind, count)]
        outcomes = list(pool.map(lambda fault: Outcome(scenario, fault), faults))
        if IS_SAMPLE or kind == "new":
            return outcomes
        # The number of calls may differ a little from run to run.
        while (last := Outcome(scenario, Fault(kind, count + 1, form, KINDS[kind]))).reached:
            outcomes.append(last)
            count += 1
        return outcomes

    def counted_calls(self, scenario):
        folder = pathlib.Path(self.folder.name).resolve() / (scenario.name + "-counted")
        shutil.copytree(scenario.template, folder)
        result = run_with(None, folder, scenario.words)
        self.assertEqual(result.code, 0, result.stderr)
        return result.calls

    @unittest.skipIf(":" in SELECTED, "one fault is selected")
    def test_each_fault_ends_in_a_readable_error_and_loses_no_data(self):
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for scenario in self.scenarios:
                calls = self.counted_calls(scenario)
                for kind in KINDS:
                    for form in self.forms_of(kind):
                        with self.subTest(scenario=scenario.name, kind=kind, form=form, seed=SEED):
                            reached = [outcome for outcome in self.outcomes_of(scenario, kind, form, calls[kind], pool)
                                       if outcome.reached]
                            for outcome in reached:
                                outcome.count()
                            if text := grouped(reached):
                                self.fail(text)

    @unittest.skipUnless(":" in SELECTED, "no fault is selected")
    def test_the_selected_fault(self):
        _, kind, call, form, *code = SELECTED.split(":")
        fault = Fault(kind, int(call), form, int(code[0]) if code else KINDS[kind])
        outcome = Outcome(self.scenarios[0], fault)
        print(outcome.text())
        self.assertTrue(outcome.reached, "the run makes fewer calls of this kind")
        self.assertEqual(outcome.problems, [])


class Checks(unittest.TestCase):
    """The checks after a fault find what they look for."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()

    def problems_after(self, harm):
        """Returns the problems of a run that succeeded and was harmed afterwards."""
        scenario = Fresh(self.folder / "fresh")
        result = run(scenario.template, scenario.words)
        harm(scenario.template)
        return list(scenario.problems_after(scenario.template, result))

    def test_a_run_without_faults_has_no_problems(self):
        self.assertEqual(self.problems_after(lambda folder: None), [])

    def test_a_lost_checkpoint_is_found(self):
        newest = f"ck/step-{STEPS:08}"
        problems = self.problems_after(lambda folder: shutil.rmtree(folder / newest))
        self.assertIn(f"lost checkpoint: step {STEPS} was saved, and the run resumes from step {STEPS - 1}", problems)

    def test_a_damaged_checkpoint_is_found(self):
        weights = f"ck/step-{STEPS:08}/weights-0.safetensors"
        self.assertIn("a checkpoint is damaged", self.problems_after(lambda folder: os.truncate(folder / weights, 100)))

    def test_other_losses_and_leftovers_are_found(self):
        def harm(folder):
            metrics = folder / "run/metrics.jsonl"
            metrics.write_text(re.sub(r'"loss":\d', '"loss":9', metrics.read_text(), count=1))
            (folder / "run/config.json.part1").write_text("")
        problems = self.problems_after(harm)
        self.assertIn("the resumed run has other losses than a run without faults", problems)
        self.assertIn("the resumed run leaves run/config.json.part1", problems)


def tearDownModule():
    """Prints how often each kind was injected, and what it led to."""
    if not table:
        return
    print(f"\n{'scenario':<13} {'kind':<9}" + "".join(f"{column:>{len(column) + 2}}" for column in COLUMNS))
    for (scenario, kind), counter in table.items():
        print(f"{scenario:<13} {kind:<9}" + "".join(f"{counter[column]:>{len(column) + 2}}" for column in COLUMNS))
    print(f"seed {SEED}")


if __name__ == "__main__":
    unittest.main()
