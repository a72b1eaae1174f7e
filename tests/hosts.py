"""Hosts that are network namespaces of this machine, on one bridge. A test of them calls run_inside(main)."""

import contextlib
import os
import subprocess
import sys
import time


def run(*words):
    subprocess.run(words, check=True)


class Hosts:
    """As many as asked for, each as long as a process that sleeps in it. The bridge is in this process's own namespace."""

    def __init__(self, count):
        self.addresses = [f"10.77.0.{1 + host}" for host in range(count)]
        self.sleepers = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.end)
            run("ip", "link", "add", "bridge", "type", "bridge")
            run("ip", "link", "set", "bridge", "up")
            own = os.readlink("/proc/self/ns/net")
            for host, address in enumerate(self.addresses):
                sleeper = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
                self.sleepers.append(sleeper)
                deadline = time.monotonic() + 10
                while os.readlink(f"/proc/{sleeper.pid}/ns/net") == own:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the namespace of host {host} did not come")
                    time.sleep(0.01)
                run("ip", "link", "add", f"host{host}", "type", "veth", "peer", "name", "wire", "netns", str(sleeper.pid))
                run("ip", "link", "set", f"host{host}", "master", "bridge", "up")
                run(*self.inside(host), "ip", "address", "add", f"{address}/24", "dev", "wire")
                for link in ("lo", "wire"):
                    run(*self.inside(host), "ip", "link", "set", link, "up")
            stack.pop_all()
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        for sleeper in self.sleepers:
            sleeper.kill()
            sleeper.wait()
        subprocess.run(["ip", "link", "del", "bridge"], check=False, capture_output=True)

    def inside(self, host):
        return ["nsenter", "-t", str(self.sleepers[host].pid), "-n"]

    def start(self, host, rank, ranks, port, *words, local_rank=0, local_ranks=1, **options):
        """A rank on a host, with the environment that torchrun gives."""
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(local_rank),
                           LOCAL_WORLD_SIZE=str(local_ranks), MASTER_ADDR=self.addresses[0], MASTER_PORT=str(port))
        return subprocess.Popen([*self.inside(host), *map(str, words)], env=environment, **options)

    def cut(self, host):
        """Off from all others."""
        run("ip", "link", "set", f"host{host}", "down")

    def listening(self, host):
        command = [*self.inside(host), "ss", "-Hltn"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def ends(processes, seconds):
    """How they end, all within this time."""
    deadline = time.monotonic() + seconds
    try:
        return [one.wait(max(0.1, deadline - time.monotonic())) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def run_inside(main):
    """Runs main(*words) in a namespace of its own, where this user may make others."""
    if os.environ.get("PENSTOCK_HOSTS") == "inside":
        main(*sys.argv[1:])
        return
    if subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0:
        print("NOT RUN: this machine does not let its users make network namespaces")
        sys.exit(77)
    os.environ["PENSTOCK_HOSTS"] = "inside"
    os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])
