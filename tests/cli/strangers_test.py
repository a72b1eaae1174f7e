"""Tests of connections that do not belong to a run: other jobs, wrong tokens, silent listeners, slow and idle connections,
random bytes, all on loopback; and of the limits of memory, time, file descriptors and processes.
PENSTOCK names the command and REFERENCE_PYTHON a Python with torch; PENSTOCK_STRANGERS=N repeats the random attacks N times."""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import unittest

from command_case import PENSTOCK, without_waiting
from train_case import Case

ROUNDS = int(os.environ.get("PENSTOCK_STRANGERS", "1"))

SMALL = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listening_ports(process):
    """The ports of loopback that a process listens on."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports


class Strangers(Case):
    def rank(self, rank, port, *words, ranks=2, token="ours", limits=None):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "PENSTOCK_JOB_TOKEN": token}
        process = subprocess.Popen([PENSTOCK, "train", *map(str, SMALL), *map(str, words)], cwd=self.folder,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
                                   preexec_fn=limits)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def end_of(self, process, code, timeout=120):
        _, text = process.communicate(timeout=timeout)
        self.assertEqual(process.returncode, code, text)
        return without_waiting(text)

    def expected_losses(self, steps):
        self.train(*SMALL, "--steps", steps, output="undisturbed")
        return self.losses("undisturbed")

    def wait_until_listening(self, process, count):
        deadline = time.monotonic() + 60
        while len(ports := listening_ports(process.pid)) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertGreaterEqual(len(ports), count)
        return ports


def at_most(**limits):
    """Sets limits of a process before it starts: files=256."""
    names = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
    return lambda: [resource.setrlimit(names[name], (limit, limit)) for name, limit in limits.items()]


class OtherJobs(Strangers):
    def test_a_process_with_another_token_is_rejected_and_the_job_continues(self):
        port = free_port()
        words = ["--steps", 2, "--output", "run"]
        first = self.rank(0, port, *words)
        for token in ("theirs", ""):
            text = self.end_of(self.rank(1, port, *words, token=token), 2)
            self.assertEqual(
                text,
                "penstock: rank 1 has another job token than rank 0 at MASTER_ADDR:MASTER_PORT, which belongs to another job.\n"
                "  Hint: give all ranks of a job the same PENSTOCK_JOB_TOKEN, and each job a MASTER_PORT of its own.\n")
        second = self.rank(1, port, *words)
        self.end_of(second, 0)
        self.end_of(first, 0)
        self.assertEqual(self.losses(), self.expected_losses(2))

    def test_a_waiting_rank_reports_a_process_with_another_token(self):
        port = free_port()
        first = self.rank(0, port, "--timeout", 8)
        self.end_of(self.rank(1, port, token="theirs"), 2)
        self.assertIn("rank 1 of 2 has not connected within 8 s.\n  a process with another job token was refused as rank 1.\n",
                      self.end_of(first, 2))

    def test_two_jobs_on_one_port_do_not_mix(self):
        port = free_port()
        ours = [self.rank(0, port, "--steps", 2, "--output", "run")]
        self.wait_until_listening(ours[0], 1)
        theirs = [self.rank(rank, port, "--steps", 3, "--output", "theirs", token="theirs") for rank in (0, 1)]
        self.assertRegex(self.end_of(theirs[0], 2), r"rank 0 cannot listen on MASTER_ADDR:MASTER_PORT, .*: Address already in use")
        self.assertIn("has another job token than rank 0", self.end_of(theirs[1], 2))
        ours.append(self.rank(1, port, "--steps", 2, "--output", "run"))
        for process in ours:
            self.end_of(process, 0)
        self.assertEqual(self.losses(), self.expected_losses(2))
        self.assertFalse((self.folder / "theirs").exists())


class Attack:
    """Opens connections to ports of a run until the block ends, at most `most` at a time."""

    def __init__(self, ports, behave, most):
        self.ports, self.behave, self.most = ports, behave, most
        self.ending = threading.Event()
        self.attempts = 0
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.thread.join()

    def run(self):
        connections = []
        while not self.ending.is_set():
            self.attempts += 1
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", random.choice(self.ports)), timeout=0.2))
            for connection in connections:
                with contextlib.suppress(OSError):
                    self.behave(connection)
            if len(connections) >= self.most:
                connections.pop(random.randrange(len(connections))).close()
            self.ending.wait(0.002)
        for connection in connections:
            connection.close()


def idle(_):
    pass


def slow(connection):
    if random.random() < 0.05:
        connection.send(b"\0")


def noisy(connection):
    connection.send(random.randbytes(random.choice((1, 4, 8, 64, 1000))))


def web_browser(connection):
    connection.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


class Connections(Strangers):
    def test_of_strangers_do_not_change_what_a_run_computes(self):
        steps = 20
        expected = self.expected_losses(steps)
        for behave in (idle, slow, noisy, web_browser) * ROUNDS:
            for moment in ("store", "running"):
                with self.subTest(behave=behave.__name__, moment=moment):
                    port = free_port()
                    words = ["--steps", steps, "--output", "run", "--overwrite", "--timeout", 60]
                    first = self.rank(0, port, *words)
                    self.wait_until_listening(first, 1)
                    if moment == "store":
                        with Attack([port], behave, most=20) as attack:
                            second = self.rank(1, port, *words)
                            self.end_of(second, 0)
                            self.end_of(first, 0)
                    else:
                        shutil.rmtree(self.folder / "run", ignore_errors=True)
                        second = self.rank(1, port, *words)
                        ports = self.wait_until_listening(first, 2) + self.wait_until_listening(second, 1)
                        self.wait_for_steps(1)
                        with Attack(ports, behave, most=20) as attack:
                            self.end_of(second, 0)
                            self.end_of(first, 0)
                    self.assertEqual(self.losses(), expected)
                    self.assertGreater(attack.attempts, 0)

    def test_are_not_accepted_once_all_ranks_have_connected(self):
        port = free_port()
        words = ["--steps", 100000, "--output", "run", "--overwrite"]
        ranks = [self.rank(rank, port, *words) for rank in (0, 1)]
        self.wait_for_steps(2)
        for process in ranks:
            # Rank 0 has the port of the store and one of Gloo.
            for one in self.wait_until_listening(process, 2 if process is ranks[0] else 1):
                with self.assertRaises(TimeoutError):
                    socket.create_connection(("127.0.0.1", one), timeout=0.3)
        ranks[0].send_signal(signal.SIGTERM)
        for process in ranks:
            self.end_of(process, 143)

    def test_that_use_up_the_descriptors_of_a_rank_end_it_with_an_error(self):
        port = free_port()
        first = self.rank(0, port, "--timeout", 5, limits=at_most(files=64))
        self.wait_until_listening(first, 1)
        with contextlib.ExitStack() as connections:
            for _ in range(100):
                connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            second = self.rank(1, port, "--timeout", 5)
            self.assertRegex(self.end_of(second, 2), "penstock: rank 1 (found no store at|cannot reach) MASTER_ADDR:MASTER_PORT")
            self.assertIn("penstock: rank 1 of 2 has not connected within 5 s.", self.end_of(first, 2))


class Limits(Case):
    def export_large(self):
        """A model that takes 1 GiB for each microbatch."""
        self.python("""
class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x) + torch.ones(256, 1024, 1024).sum()
torch.export.save(torch.export.export(Large(), (torch.ones(2, 4),)), "large.pt2")
save_tensors({"args.0": torch.ones(2, 4)}, "inputs.safetensors")
save_tensors({"args.0": torch.ones(2, 4), "target": torch.ones(2, 4)}, "batch.safetensors")
""")

    def test_of_memory_end_a_model_that_takes_more(self):
        self.export_large()
        (self.folder / "data").mkdir()
        (self.folder / "batch.safetensors").rename(self.folder / "data/batch.safetensors")
        limit = ["--memory-limit", "256MiB"]
        commands = [["run", "large.pt2", "--inputs", "inputs.safetensors", "--output", "out.safetensors"],
                    ["check", "large.pt2", "--microbatches", 1],
                    ["train", "large.pt2", "--data", "data", "--loss", "mse", "--microbatches", 1, "--stages", 1, "--steps", 1]]
        for words in commands:
            for transport in ("threads", "gloo"):
                with self.subTest(words=words, transport=transport):
                    result = self.penstock(*words, "--transport", transport, *limit, code=2)
                    self.assertRegex(result.stderr, "can't allocate memory: you tried to allocate 1073741824 bytes")
        self.assertFalse((self.folder / "out.safetensors").exists())
        self.penstock(*commands[0], "--memory-limit", "3GiB")
        # A lower limit of the system still applies.
        result = subprocess.run([PENSTOCK, *map(str, commands[1]), "--memory-limit", "3GiB"], cwd=self.folder,
                                capture_output=True, text=True, timeout=60,
                                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 33)))
        self.assertEqual(result.returncode, 2)
        self.assertTrue((self.folder / "out.safetensors").exists())

    def test_of_time_end_the_command(self):
        self.export_large()
        for words in (["split", "large.pt2"], ["check", "large.pt2"], ["check", "large.pt2", "--transport", "gloo"],
                      ["train", *SMALL]):
            result = self.penstock(*words, "--time-limit", "0.002", code=2)
            self.assertEqual(result.stderr.splitlines()[0], "penstock: time limit of 0.002 s exceeded.")
        # Process ranks reach their limit before the process that has started them.
        result = self.penstock("train", *SMALL, "--steps", 1000000, "--transport", "gloo", "--time-limit", 3, code=2)
        self.assertIn("penstock: time limit of 3 s exceeded.\n", result.stderr)
        # A long time limit changes nothing.
        self.penstock("split", "large.pt2", "--time-limit", "1e300")

    def test_with_invalid_values_are_rejected(self):
        for option, value, expected in (("--memory-limit", "12", "a size above 0 with its unit, such as 512MiB, 2GB or 4096B"),
                                        ("--memory-limit", "-1GB", "a size above 0 with its unit, such as 512MiB, 2GB or 4096B"),
                                        ("--time-limit", "0", "a number above 0")):
            result = self.penstock("split", "x.pt2", option, value, code=2)
            self.assertIn(f"{option}: '{value}' should be {expected}", result.stderr)

    def test_of_descriptors_are_reported(self):
        codes = set()
        for files in range(10, 44, 4):
            result = subprocess.run([PENSTOCK, "train", *map(str, SMALL), "--steps", "1", "--transport", "gloo", "--output",
                                     "run", "--overwrite"], cwd=self.folder, capture_output=True, text=True, timeout=60,
                                    preexec_fn=at_most(files=files))
            codes.add(result.returncode)
            if result.returncode != 0:
                self.assertRegex(result.stderr, rf"connections need \d+ file descriptors, and of {files} this process has|"
                                                "Too many open files")
                self.assertNotIn("terminate called", result.stderr)
        self.assertEqual(codes, {0, 2})

    @unittest.skipUnless(os.geteuid() == 0, "needs root, to run as a user without other processes")
    def test_of_processes_are_reported(self):
        self.folder.chmod(0o777)
        for transport in ("threads", "gloo"):
            for processes in (1, 2, 3, 4, 6, 8):
                with self.subTest(transport=transport, processes=processes):
                    result = subprocess.run(
                        [PENSTOCK, "train", *map(str, SMALL), "--steps", "1", "--transport", transport, "--output", "run",
                         "--overwrite", "--timeout", "5"],
                        cwd=self.folder, capture_output=True, text=True, timeout=60, user=65534, group=65534,
                        extra_groups=[], preexec_fn=at_most(processes=processes))
                    self.assertIn(result.returncode, (0, 2), result.stderr)
                    if result.returncode == 2:
                        self.assertRegex(result.stderr, "penstock: .*Resource temporarily unavailable")
                        self.assertNotIn("terminate called", result.stderr)


if __name__ == "__main__":
    unittest.main()
