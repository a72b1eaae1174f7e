"""Two hosts, as network namespaces of this machine: a pipeline trains across them, and each notices when they are cut
off from one another.

    hosts_test.py FOLDER    # with penstock_gloo_test and penstock_victim
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
NOTICED = 10
TIMEOUT_MS = 3000


def run(*words):
    subprocess.run(words, check=True)


class Hosts:
    """This process's namespace is the first host; the second one lasts as long as a process that sleeps in it."""

    def __enter__(self):
        self.sleeper = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
        self.inside = [[], ["nsenter", "-t", str(self.sleeper.pid), "-n"]]
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{self.sleeper.pid}/ns/net") == own:
            if time.monotonic() > deadline:
                raise TimeoutError("the second namespace did not come")
            time.sleep(0.01)
        run("ip", "link", "add", "east", "type", "veth", "peer", "name", "west", "netns", str(self.sleeper.pid))
        for host, link in enumerate(["east", "west"]):
            run(*self.inside[host], "ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", link)
            for one in ["lo", link]:
                run(*self.inside[host], "ip", "link", "set", one, "up")
        return self

    def __exit__(self, *_):
        self.sleeper.kill()
        self.sleeper.wait()

    def start(self, host, port, *words):
        """A rank on a host, with the environment that torchrun gives."""
        environment = dict(os.environ, RANK=str(host), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        environment.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port))
        return subprocess.Popen([*self.inside[host], *map(str, words)], env=environment)

    def cut(self):
        run("ip", "link", "set", "east", "down")


def ends(processes, seconds):
    deadline = time.monotonic() + seconds
    try:
        return [one.wait(max(0.1, deadline - time.monotonic())) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def main(folder):
    with Hosts() as hosts:
        tests = [hosts.start(host, 29400, folder / "penstock_gloo_test", "--gtest_brief=1") for host in (0, 1)]
        found = ends(tests, 300)
        assert found == [0, 0], f"the tests of processes on two hosts ended with {found}"
        listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=False).stdout
        assert listening == "", f"somebody still listens:\n{listening}"

        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place, "time")
            # Each expects to lose the other.
            ranks = [
                hosts.start(host, 29401, folder / "penstock_victim", 0, 1 - host, 0, 0, TIMEOUT_MS, file, "1F1B")
                for host in (0, 1)
            ]
            time.sleep(4)
            assert [one.poll() for one in ranks] == [None, None], "the ranks ended before they were cut off"
            file.write_text(f"{time.monotonic():.6f}\n")
            hosts.cut()
            found = ends(ranks, 60)
            assert found == [NOTICED, NOTICED], f"the ranks that were cut off ended with {found}"
    print("two hosts: trained across them, and each noticed that it was cut off")


if __name__ == "__main__":
    if os.environ.get("PENSTOCK_HOSTS") == "inside":
        main(pathlib.Path(sys.argv[1]))
    else:
        if subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0:
            print("NOT RUN: this machine does not let its users make network namespaces")
            sys.exit(77)
        os.environ["PENSTOCK_HOSTS"] = "inside"
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
