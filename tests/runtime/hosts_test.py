"""Two hosts, as network namespaces of this machine: a pipeline trains across them, and each notices when they are cut
off from one another.

    hosts_test.py FOLDER    # with penstock_gloo_test and penstock_victim
"""

import pathlib
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from hosts import Hosts, ends, run_inside  # noqa: E402

NOTICED = 10
TIMEOUT_MS = 3000


def main(folder):
    folder = pathlib.Path(folder)
    with Hosts(2) as hosts:
        tests = [hosts.start(host, host, 2, 29400, folder / "penstock_gloo_test", "--gtest_brief=1") for host in (0, 1)]
        found = ends(tests, 300)
        assert found == [0, 0], f"the tests of processes on two hosts ended with {found}"
        listening = hosts.listening(0) + hosts.listening(1)
        assert listening == "", f"somebody still listens:\n{listening}"

        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place, "time")
            # Each expects to lose the other.
            ranks = [
                hosts.start(host, host, 2, 29401, folder / "penstock_victim", 0, 1 - host, 0, 0, TIMEOUT_MS, file, "1F1B")
                for host in (0, 1)
            ]
            time.sleep(4)
            assert [one.poll() for one in ranks] == [None, None], "the ranks ended before they were cut off"
            file.write_text(f"{time.monotonic():.6f}\n")
            hosts.cut(0)
            found = ends(ranks, 60)
            assert found == [NOTICED, NOTICED], f"the ranks that were cut off ended with {found}"
    print("two hosts: trained across them, and each noticed that it was cut off")


if __name__ == "__main__":
    run_inside(main)
