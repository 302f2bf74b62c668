# SPDX-License-Identifier: MIT
"""What the tests of gpuloan.py share. GPULOAN_LIBRARY and GPULOAN_SIM_LIBRARY name the build's two libraries."""
import atexit
import faulthandler
import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
MODULE = HERE.parent.parent / "lib" / "python" / "gpuloan.py"
PATIENCE = 60.0  # of every wait; nothing here takes a second
faulthandler.dump_traceback_later(280, exit=True)

# One simulated machine per test program: the driver reads this once.
_folder = tempfile.TemporaryDirectory(prefix="gpuloan-python-")
atexit.register(_folder.cleanup)
os.environ.update(GPULOAN_SIM_STATE=_folder.name + "/state", GPULOAN_DRIVER="sim", PYTHONDONTWRITEBYTECODE="1")
for name in ("GPULOAN_LIBRARY", "GPULOAN_SIM_LIBRARY"):
    if not os.environ.get(name):
        sys.exit(f"{name} has to name the build's library: run 'meson test --suite python', or set both by hand")
sys.dont_write_bytecode = True
sys.path[:0] = [str(MODULE.parent), str(HERE)]

import gpuloan  # noqa: E402


def worker(*arguments):
    """The command line of a worker of jobs.py."""
    return [sys.executable, "-W", "error", str(HERE / "jobs.py"), *arguments]


def python(code, timeout=PATIENCE, **options):
    """Runs a program of its own, with gpuloan in reach."""
    head = f"import sys; sys.path[:0] = [{str(MODULE.parent)!r}, {str(HERE)!r}]\n"
    return subprocess.run([sys.executable, "-W", "error", "-c", head + code], capture_output=True, text=True, timeout=timeout, **options)


def eventually(test, what):
    """Waits until test() is true; a time limit, not a delay."""
    end = time.monotonic() + PATIENCE
    while not test():
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE} s: {what}")
        time.sleep(0.005)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Case(unittest.TestCase):
    """A test with a parent of its own."""

    options = {}

    def setUp(self):
        self.parent = gpuloan.Exporter(**self.options)
        self.addCleanup(self.parent.close)

    def spawn(self, *arguments, **options):
        return self.parent.spawn(worker(*arguments), timeout=PATIENCE, **options)

    def refused(self, kind, *words):
        """A context: what is inside raises `kind`, and its sentence has all words."""
        case = self

        class Refused:
            def __enter__(self):
                return self

            def __exit__(self, raised, error, _):
                case.assertIsNotNone(raised, f"{kind.__name__} was not raised")
                if not issubclass(raised, kind):
                    return False
                self.error = error
                for word in words:
                    case.assertIn(word, str(error))
                return True

        return Refused()


def collect():
    for _ in range(3):
        gc.collect()


def main():
    """As unittest.main; the exit code is 77, which Meson calls skipped, where a test was skipped and none failed."""
    result = unittest.main(module="__main__", exit=False).result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
