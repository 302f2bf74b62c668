#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan canary on the simulated driver: TAP and JSON, what is skipped, what fails, and workers of the user's choice."""
import pathlib
import re
import unittest

from cli import EXE, EXIT, CliTest

KINDS = ["vmm", "vmm-foreign", "pool", "ipc", "host"]
SHAPES = {"contiguous": 65536, "view": 65536, "odd": 69645, "large": 2162688}
LINE = re.compile(r"^(ok|not ok) (\d+) - (\S+) (\S+): (\d+) bytes(?:, ([\d.]+) us)?(?:,| # SKIP) (.*)$")
SERVE = f"exec '{EXE}' canary --serve"


class CanaryTest(CliTest):
    def canary(self, *arguments, code="ok", **options):
        """The result, and of each (kind, shape) whether it is ok and what is said of it."""
        result = self.run_cli("canary", *arguments, **options)
        self.assertEqual(result.code, EXIT[code], str(result))
        lines = result.out.splitlines()
        self.assertEqual(lines[:2], ["TAP version 13", "1..20"], str(result))
        self.assertTrue(lines[-1].startswith("# "), str(result))
        tests = {}
        for number, (line, (kind, shape)) in enumerate(zip(lines[2:-1], [(k, s) for k in KINDS for s in SHAPES], strict=True), 1):
            word, index, *name, size, us, text = LINE.match(line).groups()
            self.assertEqual((int(index), *name, int(size)), (number, kind, shape, SHAPES[shape]))
            self.assertEqual(us is not None, text.endswith("verified"), line)
            self.assertEqual("# SKIP" in line, text.startswith("not attempted") and word == "ok", line)
            tests[kind, shape] = (word == "ok", text)
        return result, tests

    def expect_kinds(self, tests, wanted):
        for (kind, shape), (good, text) in tests.items():
            start = wanted.get(kind, "zero-copy verified")
            self.assertTrue(text.startswith(start), f"{kind} {shape}: {text}")
            self.assertEqual(good, not start.startswith(("demoted", "failed")), f"{kind} {shape}")

    def test_everything(self):
        for arguments, env in ((["--experimental-pool"], {}), ([], {"GPULOAN_POOL": "1"})):
            result, tests = self.canary(*arguments, env=env)
            self.expect_kinds(tests, {"host": "copy verified"})
            self.assertIn("# 20 verified, 0 not attempted, 0 demoted, 0 failed", result.out)
            self.assertIn("SIMULATED", result.err)

    def test_pool_is_not_tried_by_itself_and_one_rung_is_tried_alone(self):
        self.expect_kinds(self.canary()[1], {"host": "copy verified", "pool": "not attempted: experimental: --experimental-pool"})
        left = {kind: "not attempted: left out" for kind in KINDS}
        for rung in ("pool", "ipc"):
            self.expect_kinds(self.canary("--rung", rung)[1], left | {rung: "zero-copy verified"})
        self.expect_kinds(self.canary("--rung", "vmm", "--gate", "event")[1], left | {"vmm": "zero-copy", "vmm-foreign": "zero-copy"})

    def test_json(self):
        result = self.expect_ok(self.run_cli("canary", "--json", "--experimental-pool"))
        report = result.json
        self.assertEqual([report[name] for name in ("command", "ok", "exit_code")], ["canary", True, 0])
        self.assertEqual([(test["kind"], test["shape"]) for test in report["tests"]], [(kind, shape) for kind in KINDS for shape in SHAPES])
        for test in report["tests"]:
            host = test["rung"] == "host"
            self.assertEqual(test["verdict"], "copy verified" if host else "zero-copy verified")
            self.assertEqual(test["bytes"], SHAPES[test["shape"]])
            self.assertEqual(test["copied_bytes"], 2 * test["bytes"] if host else 0)
            self.assertGreater(test["us"], 0)
        self.assertEqual({report["peer"][name] for name in ("vmm", "vmm_foreign", "pool", "ipc", "host")}, {"verified"})
        report = self.run_cli("canary", "--json", "--rung", "ipc", env={"GPULOAN_SIM_FAIL": "cuIpcOpenMemHandle:1+:999"})
        self.assertEqual((report.code, report.json["exit_name"]), (1, "loan-failed"))
        self.assertEqual(report.json["peer"]["ipc"], "demoted")
        self.assertEqual(report.json["peer"]["vmm"], "not attempted")
        self.assertIn("cuIpcOpenMemHandle", report.json["peer"]["demoted_text"])
        verdicts = {(test["rung"], test["ok"], test["verdict"]) for test in report.json["tests"]}
        self.assertEqual(verdicts, {("ipc", False, "demoted")} | {(rung, True, "not attempted") for rung in ("vmm", "pool", "host")})

    def test_what_the_device_lacks_is_skipped_with_the_reason(self):
        lacking = "not attempted: this device cannot: "
        _, tests = self.canary("--experimental-pool", env={"GPULOAN_SIM_WITHOUT": "vmm,pools"})
        self.expect_kinds(tests, {"vmm": lacking, "vmm-foreign": lacking, "pool": lacking, "host": "copy verified"})
        self.assertIn("vmm: the arena is not lent without a copy", tests["vmm", "odd"][1])
        # Each row has the reason of its own floor alone.
        self.assertNotIn("pool", tests["vmm", "odd"][1])
        self.assertNotIn("vmm", tests["pool", "odd"][1])
        self.assertIn("pools: pool memory is copied (no pool rung): ", tests["pool", "odd"][1])
        # Only the worker's driver lacks it: the library says so.
        _, tests = self.canary("--experimental-pool", "--worker", f"GPULOAN_SIM_WITHOUT=vmm,pools {SERVE}")
        self.expect_kinds(tests, {"vmm": "not attempted", "vmm-foreign": "not attempted", "pool": "not attempted", "host": "copy verified"})
        self.assertIn("the importer's device has no pools", tests["pool", "odd"][1])
        self.assertIn("the importer's driver has no VMM", tests["vmm", "odd"][1])

    # K1
    def test_a_rung_that_fails_is_demoted_on_either_side(self):
        for call in ("cuIpcOpenMemHandle", "cuIpcGetMemHandle"):
            result, tests = self.canary(env={"GPULOAN_SIM_FAIL": f"{call}:1+:801"}, code="loan-failed")
            self.expect_kinds(tests, {"ipc": "demoted: ", "pool": "not attempted", "host": "copy verified"})
            self.assertIn(call, tests["ipc", "odd"][1])
            self.assertIn("gpuloan canary: ipc odd: demoted", result.err)

    # K1: a driver without legacy handles that only says so when it is asked for one. The memory is the process's own all the same.
    def test_no_legacy_handles(self):
        _, tests = self.canary(env={"GPULOAN_SIM_WITHOUT": "ipc-memory"}, code="loan-failed")
        self.expect_kinds(tests, {"ipc": "demoted: ipc: it could not be sent: cuIpcGetMemHandle", "pool": "not attempted", "host": "copy verified"})

    # D8
    def test_the_host_rung_is_proven_without_pinned_memory(self):
        _, tests = self.canary(env={"GPULOAN_SIM_WITHOUT": "host-register"})
        self.expect_kinds(tests, {kind: "not attempted" for kind in KINDS} | {"vmm": "zero-copy", "host": "copy verified"})
        # A limit on locked memory that leaves nothing, not even the tether, and an error that is also that of a lack of memory.
        _, tests = self.canary(env={"GPULOAN_SIM_PIN_LIMIT_KIB": "0"}, code="loan-failed")
        tether = "shape contiguous: the page that tells of the importer's end cannot be pinned: cuMemHostRegister"
        self.expect_kinds(tests, {"vmm": f"demoted: vmm: {tether}", "vmm-foreign": f"demoted: vmm for memory of others: {tether}",
                                  "ipc": f"demoted: ipc: {tether}", "pool": "not attempted", "host": "copy verified"})
        for text in (text for good, text in tests.values() if not good):
            self.assertEqual(text.count("the page that tells"), 1, text) # of its own rung alone

    def test_the_host_rung_fails(self):
        result, tests = self.canary("--rung", "host", "--worker", f"GPULOAN_SIM_FAIL=cuMemcpyDtoHAsync:2:999 {SERVE}", code="loan-failed")
        self.expect_kinds(tests, {kind: "not attempted" for kind in KINDS} | {"host": "demoted: host (ring, read): shape view"})

    # The library's own canary makes the first four copies; the fifth is the fill of the first shape.
    def test_a_worker_that_does_not_write(self):
        result, tests = self.canary("--worker", f"GPULOAN_SIM_FAIL=cuMemcpyHtoDAsync:5:0 {SERVE}", code="loan-failed")
        bad = {name: text for name, (good, text) in tests.items() if not good}
        self.assertEqual(bad, {("vmm", "contiguous"): "failed: byte 0 that came back is not the worker's"})
        self.assertIn("gpuloan canary: vmm contiguous: failed", result.err)

    # Each shape of the library's takes one copy out, then each check of the command one.
    def test_a_worker_that_sees_other_bytes(self):
        _, tests = self.canary("--worker", f"GPULOAN_SIM_FAIL=cuMemcpyDtoHAsync:7:0 {SERVE}", code="loan-failed")
        bad = {name: text for name, (good, text) in tests.items() if not good}
        self.assertEqual(list(bad), [("vmm", "odd")])
        self.assertIn("the worker sees a wrong byte at ", bad["vmm", "odd"])

    def test_a_worker_of_the_users_choice_may_print(self):
        result, tests = self.canary("--worker", f"echo noise; {SERVE} --fd 3")
        self.expect_kinds(tests, {"pool": "not attempted", "host": "copy verified"})
        self.assertIn("noise", result.err)

    def test_workers_that_do_not_come(self):
        result = self.expect(self.run_cli("canary", "--worker", "exit 7"), "peer-lost", "exited with code 7")
        self.assertEqual(result.out.splitlines()[:2], ["TAP version 13", "1..20"])
        self.assertTrue(result.out.splitlines()[-1].startswith("Bail out! the worker exited with code 7"), result.out)
        result = self.expect(self.run_cli("canary", "--timeout", "0.5", "--worker", "exec sleep 100"), "timeout", "did not connect")
        self.assertIn("Bail out! ", result.out)
        pid = self.folder / "pid"
        self.expect(self.run_cli("canary", "--timeout", "1", "--worker", f"sleep 1000 & echo $! >'{pid}'; wait"), "timeout")
        sleeper = int(pid.read_text())
        self.wait_for(lambda: not self.runs(sleeper), "the end of what the worker started")
        result = self.run_cli("canary", "--json", "--worker", "exit 7")
        self.assertEqual(result.json["exit_name"], "peer-lost")

    @staticmethod
    def runs(pid):
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    def test_a_worker_that_ends_badly(self):
        result = self.run_cli("canary", "--rung", "vmm", "--worker", f"'{EXE}' canary --serve; exit 9")
        self.expect(result, "loan-failed", "every shape is good, but the worker exited with code 9")
        self.assertIn("Bail out! ", result.out)
        self.assertIn("# 8 verified", result.out)
        found = self.run_cli("canary", "--json", "--rung", "vmm", "--worker", f"'{EXE}' canary --serve; exit 9").json
        self.assertEqual((found["exit_name"], sum(test["verdict"] == "zero-copy verified" for test in found["tests"])), ("loan-failed", 8))
        self.assertIn("the worker exited with code 9", found["error"])

    def test_without_a_device(self):
        result = self.expect(self.run_cli("canary", env={"GPULOAN_SIM_DEVICES": "0"}), "no-driver")
        self.assertEqual(result.out.splitlines()[0], "TAP version 13")
        self.assertTrue(result.out.splitlines()[1].startswith("Bail out! "))


if __name__ == "__main__":
    unittest.main()
