# SPDX-License-Identifier: MIT
"""What the tests of the command share: a folder and a simulated machine of their own for every test, no process left
behind, no file left behind, and helpers to run the command."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

EXE = os.environ["GPULOAN_TEST_EXE"]
SIM = os.environ["GPULOAN_TEST_SIM"]
# Sanitizers and a busy machine make everything slower; a limit only has to end a hang.
PATIENCE = 480 if os.environ.get("GPULOAN_TEST_SANITIZED") else 120

EXIT = {
    "ok": 0, "loan-failed": 1, "usage": 2, "timeout": 3, "no-driver": 4, "peer-lost": 5, "key-refused": 6,
    "path-busy": 7, "file": 8, "unsupported": 9, "uid-refused": 10, "no-listener": 11, "path-unusable": 12,
    "peer-refused": 13, "device-memory": 14, "system": 15,
}
STEPS = ["EXPORT", "READY", "IMPORT", "WRITE", "DONE", "UNIMPORT", "ACK", "RELEASE"]
# What this process ignores (started by nohup, or with '&') the commands would ignore, too.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


class Result:
    def __init__(self, process, out, err, seconds):
        self.code, self.out, self.err, self.seconds = process.returncode, out, err, seconds

    @property
    def json(self):
        return json.loads(self.out)

    def __str__(self):
        return f"exit code {self.code} after {self.seconds:.2f} s\nstdout:\n{self.out}\nstderr:\n{self.err}"


class CliTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpuloan-cli-"))
        self.state = pathlib.Path("/dev/shm" if os.path.isdir("/dev/shm") else self.folder) / f"{self.folder.name}-sim"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("GPULOAN_")}
        self.env.update(GPULOAN_DRIVER=SIM, GPULOAN_SIM_LIBRARY=SIM, GPULOAN_SIM_STATE=str(self.state),
                        XDG_CACHE_HOME=str(self.folder / "cache"))
        self.running = []
        self.groups = []
        self.open_fds = len(os.listdir("/proc/self/fd"))

    def tearDown(self):
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        left = [group for group in self.groups if self.group_alive(group)]
        for group in left:
            os.killpg(group, signal.SIGKILL)
        for path in self.state.parent.glob(self.state.name + "*"):
            path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.assertEqual(left, [], "processes were left behind")
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open_fds, "the test leaked descriptors")

    @staticmethod
    def group_alive(group):
        # Workers may still be on their way out when their parent has ended.
        for _ in range(500):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.01)
        return True

    def start(self, *arguments, env=None, stdin=subprocess.DEVNULL, pass_fds=(), stdout=subprocess.PIPE, user=None):
        process = subprocess.Popen(
            [EXE, *map(str, arguments)], env={**self.env, **(env or {})}, stdin=stdin, stdout=stdout,
            stderr=subprocess.PIPE, pass_fds=pass_fds, start_new_session=True, text=True, user=user)
        process.started = time.monotonic()
        self.running.append(process)
        self.groups.append(process.pid)
        return process

    def finish(self, process, data=None):
        out, err = process.communicate(data, timeout=PATIENCE)
        self.running.remove(process)
        return Result(process, out, err, time.monotonic() - process.started)

    def run_cli(self, *arguments, **options):
        return self.finish(self.start(*arguments, **options))

    def expect(self, result, code, *texts):
        """The exit code by name, and a sentence on stderr that has all the texts."""
        self.assertEqual(result.code, EXIT[code], str(result))
        for text in texts:
            self.assertIn(text, result.err, str(result))
        return result

    def expect_ok(self, result):
        self.assertEqual(result.code, 0, str(result))
        return result

    def check_loan(self, loan, steps=STEPS):
        self.assertTrue(loan["ended"])
        self.assertEqual(loan["outcome"], "GPULOAN_OK")
        self.assertEqual([step["step"] for step in loan["steps"]], STEPS)
        times = [step["monotonic_ns"] for step in loan["steps"] if step["step"] in steps]
        self.assertNotIn(None, times, f"a step is missing: {loan['steps']}")
        self.assertEqual(times, sorted(times), f"steps out of order: {loan['steps']}")

    def make_file(self, name, size, seed=1):
        path = self.folder / name
        block = bytes((index * 131 + seed) % 251 for index in range(65521))
        path.write_bytes((block * (size // len(block) + 1))[:size])
        return path

    def wait_for(self, condition, what):
        end = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), end, f"never came: {what}")
            time.sleep(0.005)
