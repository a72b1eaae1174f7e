"""Three hosts, as network namespaces of this machine, with two ranks each: `penstock train` trains across them; when one is
cut off, all ranks end with an error within the timeout; and two hosts resume from the checkpoint. Once started by hand and once by
torchrun.

    train_hosts_test.py PENSTOCK PYTHON    # the command, and a Python with torch
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from hosts import Hosts, ends, run_inside  # noqa: E402

MODEL = ["--digits", "1", "--rows", "12", "--layers", "4", "--width", "16", "--heads", "2", "--dropout", "0.1",
         "--microbatches", "6"]
TIMEOUT = 5


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def words(folder, steps, ranks, *more):
    return ["train", *MODEL, "--steps", str(steps), "--ranks", str(ranks), "--output", str(folder / "run"), "--timeout",
            str(TIMEOUT), *([] if "--resume" in more else ["--overwrite"]), *map(str, more)]


def by_hand(hosts, penstock, count, port, *line, **options):
    return [hosts.start(host, 2 * host + local, 2 * count, port, penstock, *line, local_rank=local, local_ranks=2, **options)
            for host in range(count) for local in range(2)]


def by_torchrun(hosts, python, penstock, count, port, *line, **options):
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "2",
                "--rdzv-backend", "static", "--master-addr", hosts.addresses[0], "--master-port", str(port), "--no-python"]
    return [subprocess.Popen([*hosts.inside(host), *torchrun, "--node-rank", str(host), penstock, *line], **options)
            for host in range(count)]


def main(penstock, python):
    with tempfile.TemporaryDirectory() as name, Hosts(3) as hosts:
        folder = pathlib.Path(name)
        whole = folder / "whole"
        subprocess.run([penstock, *words(whole, 40, 1)], check=True, stdout=subprocess.DEVNULL)
        expected = losses(whole / "run")

        started = by_hand(hosts, penstock, 3, 29500, *words(folder, 40, 6), stdout=subprocess.DEVNULL)
        assert ends(started, 120) == [0] * 6, "six ranks on three hosts did not train"
        assert losses(folder / "run") == expected, "three hosts have other losses than one rank"
        for host in range(3):
            assert hosts.listening(host) == "", f"a process still listens on host {host}:\n{hosts.listening(host)}"

        started = by_torchrun(hosts, python, penstock, 3, 29501, *words(folder, 40, 6), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
        assert ends(started, 180) == [0] * 3, "torchrun on three hosts did not train"
        assert losses(folder / "run") == expected, "torchrun's ranks have other losses than one rank"

        # Cut one host off during the run.
        kept = ["--checkpoint", folder / "kept", "--checkpoint-every", 5]
        metrics = folder / "run/metrics.jsonl"
        metrics.unlink()
        started = by_hand(hosts, penstock, 3, 29502, *words(folder, 100_000, 6, *kept), stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 12:
            assert time.monotonic() < deadline, "the run that is to be cut off did not get going"
            time.sleep(0.01)
        hosts.cut(2)
        began = time.monotonic()
        texts = [one.communicate(timeout=60)[1] for one in started]
        took = time.monotonic() - began
        assert [one.returncode for one in started] == [2] * 6, [one.returncode for one in started]
        assert took < 4 * TIMEOUT, f"it took {took:.1f} s until all had noticed"
        for rank, text in enumerate(texts):
            # The error is raised in a step, or between two steps, where each rank reports only what it has seen itself.
            known = re.search("no message came|no receive was posted|not all ranks of a group have arrived|rank [0-9] has failed", text)
            missing = range(4, 6) if rank < 4 else range(4)
            names_one = any(f"rank {one}: did not answer" in text for one in missing)
            assert text.startswith("penstock: rank ") and known and names_one, f"rank {rank} said:\n{text}"

        # The learning rates differ from those of a run of 100,000 steps, so only the number of steps is checked.
        started = by_hand(hosts, penstock, 2, 29503, *words(folder, 30, 4, *kept, "--resume"), stdout=subprocess.DEVNULL)
        assert ends(started, 120) == [0] * 4, "two hosts did not resume from the checkpoint"
        assert list(losses(folder / "run"))[-1] >= 30
    print("three hosts: trained to the losses of one rank, by hand and under torchrun; detected that one was cut off; two resumed")


if __name__ == "__main__":
    run_inside(main)
