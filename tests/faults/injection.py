"""Runs the command with one injected I/O fault. PENSTOCK names the command, and PENSTOCK_INJECT the library that is
built of inject.c and inject_new.cc."""

import dataclasses
import errno
import os
import struct
import subprocess
import tempfile

PENSTOCK = os.environ["PENSTOCK"]
INJECT = os.environ["PENSTOCK_INJECT"]

# Kinds of calls in the order in which inject.c counts them, each with the errno that it fails with.
KINDS = {
    "write": errno.ENOSPC,
    "short": 0,
    "fsync": errno.EIO,
    "rename": errno.EIO,
    "mmap": errno.ENOMEM,
    "open": errno.EMFILE,
    "close": errno.EIO,
    "unlink": errno.EACCES,
    "mkdir": errno.ENOSPC,
    "read": errno.EIO,
    "readdir": errno.EIO,
    "truncate": errno.EIO,
    "stat": errno.EIO,
    "new": 0,
}
FORMS = ("once", "always")
# A short write happens once: the next call writes the rest.
FORMS_OF = {"short": ("once",)}

# Seconds that a run may take on a slow machine; it takes well under one.
TIMEOUT = 60
BYTES_OF_FAULT = 1024


@dataclasses.dataclass(frozen=True)
class Fault:
    """The n-th call of a kind fails, once or from then on."""

    kind: str
    call: int
    form: str
    errno: int

    def environment(self):
        return {"PENSTOCK_INJECT_KIND": self.kind, "PENSTOCK_INJECT_CALL": str(self.call),
                "PENSTOCK_INJECT_FORM": self.form, "PENSTOCK_INJECT_ERRNO": str(self.errno)}


@dataclasses.dataclass
class Result:
    """Result of a run. The code is None if it did not end within the timeout."""

    code: int | None
    stdout: str
    stderr: str
    # Number of calls of each kind.
    calls: dict = dataclasses.field(default_factory=dict)
    # The first call that failed, such as "rename ./run/config.json.part17"; empty if the fault was not reached.
    failed_call: str = ""


def run(folder, words, environment=None):
    """Runs the command in a folder without faults."""
    process = subprocess.Popen([PENSTOCK, *map(str, words)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})})
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
        return Result(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        return Result(None, stdout, stderr)


def run_with(fault, folder, words):
    """Runs the command in a folder with a fault, or counts its calls if the fault is None."""
    with tempfile.NamedTemporaryFile() as board:
        board.write(bytes(8 * len(KINDS) + BYTES_OF_FAULT))
        board.flush()
        environment = {"LD_PRELOAD": INJECT, "PENSTOCK_INJECT_DIRECTORY": str(folder),
                       "PENSTOCK_INJECT_COUNT": board.name}
        # The calls of an allocation count only if they may fail.
        result = run(folder, words, {**environment, **(fault or Fault("new", 0, "once", 0)).environment()})
        board.seek(0)
        content = board.read()
    result.calls = dict(zip(KINDS, struct.unpack_from(f"{len(KINDS)}Q", content)))
    result.failed_call = content[8 * len(KINDS):].split(b"\0")[0].decode()
    return result
