#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two processes that are kept apart, by namespaces (E2, E3, E13) or by being stopped for longer than any timer (B14); and 64
workers that come at once (B11)."""
import os
import signal
import subprocess
import time
import unittest

from cli import EXE, EXIT, CliTest

PID_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
# A user of no rights in namespaces of its own, as in an unprivileged container.
CONTAINER = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--uts", "--cgroup", *PID_NAMESPACE[1:],
             "setpriv", "--no-new-privs", "--bounding-set", "-all", "--inh-caps", "-all"]
STOPPED = 3


def can(prefix):
    return subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0


class ApartTest(CliTest):
    def setUp(self):
        super().setUp()
        self.socket = self.folder / "s"
        self.to = self.folder / "to"

    def start_under(self, prefix, *arguments):
        process = subprocess.Popen([*prefix, EXE, *map(str, arguments)], env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True, text=True)
        process.started = time.monotonic()
        self.running.append(process)
        self.groups.append(process.pid)
        return process

    def loan_under(self, prefix):
        source = self.make_file("from", 3_000_001)
        lend = self.start("lend", "--json", "--socket", self.socket, "--from", source, "--require-zero-copy")
        borrow = self.start_under(prefix, "borrow", "--json", "--socket", self.socket, "--to", self.to)
        borrowed, lent = self.expect_ok(self.finish(borrow)), self.expect_ok(self.finish(lend))
        self.assertEqual(source.read_bytes(), self.to.read_bytes())
        self.assertEqual(lent.json["loan"]["rung"], "vmm")
        self.check_loan(lent.json["loan"])
        return borrowed

    @unittest.skipUnless(can(PID_NAMESPACE), "no PID namespace can be made here")
    def test_pid_namespace(self):
        self.loan_under(PID_NAMESPACE)

    @unittest.skipUnless(can(CONTAINER), "no unprivileged container can be made here")
    def test_unprivileged_container(self):
        self.loan_under(CONTAINER)

    @unittest.skipUnless(can(PID_NAMESPACE), "no PID namespace can be made here")
    def test_handles_across_pid_namespaces(self):
        for rung in ("ipc", "pool"):
            for prefix, works in (([], True), (PID_NAMESPACE, False)):
                worker = f"exec {' '.join(prefix)} '{EXE}' canary --serve"
                result = self.run_cli("canary", "--rung", rung, "--worker", worker)
                self.assertEqual(result.code, EXIT["ok" if works else "loan-failed"], str(result))
                said = [line for line in result.out.splitlines() if f" - {rung} " in line]
                self.assertEqual(len(said), 4)
                for line in said:
                    self.assertEqual("zero-copy verified" in line, works, line)
                    self.assertEqual("the peer is in another PID namespace" in line, not works, line)

    @unittest.skipUnless("GPULOAN_TEST_FORBIDDEN" in os.environ, "built without libseccomp")
    def test_probe_names_the_remedy(self):  # F3
        for what, remedy in (("io_uring_setup:EPERM", "kernel.io_uring_disabled=0"), ("io_uring_enter:ENOSYS", "Linux 6.0 or newer")):
            result = self.finish(self.start_under([os.environ["GPULOAN_TEST_FORBIDDEN"], what], "probe"))
            if result.code == 77:
                self.skipTest(result.out)
            line, = [line for line in self.expect_ok(result).out.splitlines() if line.split()[:1] == ["io_uring"]]
            self.assertRegex(line, r"^ *io_uring +NO ")
            self.assertIn(remedy, line)

    def stop(self, *processes):
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOPPED)  # longer than any interval of the library's
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)

    def test_both_stopped(self):
        size = 3_000_001
        source = self.make_file("from", size).read_bytes()
        lend = self.start("lend", "--json", "--socket", self.socket, "--from", "-", stdin=subprocess.PIPE)
        borrow = self.start("borrow", "--socket", self.socket, "--to", "-")
        self.stop(lend, borrow)  # one waits for its input, the other for the first
        lend.stdin.buffer.write(source)
        lend.stdin.close()
        lend.stdin = None
        begin = borrow.stdout.buffer.read(100)  # the loan is held: the rest does not fit into the pipe
        self.stop(lend, borrow)
        rest = borrow.stdout.buffer.read()
        self.assertEqual(begin + rest, source)
        borrow.wait()
        self.assertEqual(borrow.returncode, 0, borrow.stderr.read())
        borrow.stdout.close(), borrow.stderr.close()
        self.running.remove(borrow)
        self.check_loan(self.expect_ok(self.finish(lend)).json["loan"])

    def test_64_workers(self):
        # An attached end has 10 s from attach on, which is before its process has started: 16 sanitized ones take longer on busy CPUs.
        workers = 4 if os.environ.get("GPULOAN_TEST_SANITIZED") else 64
        for _ in range(2):
            report = self.expect_ok(self.run_cli("demo", "--json", "--workers", workers, "--size", "64KiB")).json
            self.assertEqual([worker["ok"] for worker in report["workers"]], [True] * workers)


if __name__ == "__main__":
    unittest.main()
