#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan demo on the simulated driver: sizes, workers, rungs, gates, engines, and workers that misbehave."""
import hashlib
import os
import unittest

from cli import CliTest, STEPS


class DemoTest(CliTest):
    def demo(self, *arguments, **options):
        result = self.expect_ok(self.run_cli("demo", "--json", *arguments, **options))
        report = result.json
        self.assertTrue(report["ok"])
        self.assertTrue(report["driver"]["simulated"])
        for worker in report["workers"]:
            self.assertTrue(worker["ok"])
            for loan in worker["loans"]:
                self.check_loan(loan)
        return report

    def test_files_of_all_sizes(self):
        for size in (0, 1, 4095, 65537, 1 << 20, 9_000_001):
            with self.subTest(size=size):
                path = self.make_file("data", size)
                report = self.demo(path)
                worker, = report["workers"]
                self.assertEqual(worker["result_sha256"], hashlib.sha256(path.read_bytes()).hexdigest())
                self.assertEqual([loan["bytes"] for loan in worker["loans"]], [size, size])
                self.assertEqual(worker["request_metadata"], f"uint8[{size}]")

    def test_makes_its_own_bytes(self):
        report = self.demo("--size", "12345", "--seed", 9)
        self.assertEqual(report["source"]["bytes"], 12345)
        again = self.demo("--size", "12345", "--seed", 9)
        other = self.demo("--size", "12345", "--seed", 10)
        self.assertEqual(report["source"]["sha256"], again["source"]["sha256"])
        self.assertNotEqual(report["source"]["sha256"], other["source"]["sha256"])

    # G5
    def test_worker_on_another_device(self):
        two = {"GPULOAN_SIM_DEVICES": "2"}
        for device, other in ((0, 1), (1, 0)):
            report = self.demo("--device", device, "--worker-device", other, env=two)
            self.assertEqual(report["device"]["ordinal"], device)
            for loan in report["workers"][0]["loans"]:
                self.assertEqual((loan["rung"], loan["copied_bytes"]), ("vmm", 0))
        self.expect(self.run_cli("demo", "--worker-device", 9, env=two), "no-driver", "worker 1", "exited with code 4")
        report = self.demo("--worker-device", 1, env={**two, "GPULOAN_SIM_PEERS": "1>0"})
        self.assertEqual(report["workers"][0]["loans"][0]["rung"], "vmm")
        report = self.demo("--worker-device", 1, env={**two, "GPULOAN_SIM_PEERS": "0>1"})
        for loan in report["workers"][0]["loans"]:
            self.assertEqual(loan["rung"], "host")
            self.assertIn("no peer access to this one: " + report["device"]["uuid"], loan["rung_reason"])

    def test_eight_workers(self):
        report = self.demo("--workers", 8, "--size", "3MiB")
        self.assertEqual(len({worker["pid"] for worker in report["workers"]}), 8)
        self.assertEqual(len({worker["result_sha256"] for worker in report["workers"]}), 1)

    # C12
    def test_text_has_the_eight_steps_and_says_which_driver_ran(self):
        result = self.expect_ok(self.run_cli("demo", "--size", "4KiB"))
        lines = result.out.splitlines()
        self.assertEqual([line.split()[0] for line in lines if line.split() and line.split()[0] in STEPS], STEPS)
        self.assertTrue(any(line.startswith("driver  SIMULATED driver") for line in lines), result.out)
        self.assertTrue(any(line.startswith("engine  ") for line in lines), result.out)
        summary = self.expect_ok(self.run_cli("demo", "--size", "4KiB", "--workers", 2)).out
        self.assertNotIn("UNIMPORT", summary)
        verbose = self.expect_ok(self.run_cli("demo", "--size", "4KiB", "--workers", 2, "--verbose")).out
        self.assertEqual(verbose.count("UNIMPORT"), 2)

    # M1
    def test_all_rungs_gates_and_engines(self):
        for rung in ("vmm", "host"):
            for gate in ("memop", "event", "host"):
                for engine in ("epoll", "io_uring"):
                    with self.subTest(rung=rung, gate=gate, engine=engine):
                        self.check_cell(rung, gate, engine)

    def check_cell(self, rung, gate, engine):
        result = self.run_cli("demo", "--json", "--size", 300001, "--rung", rung, "--gate", gate, "--engine", engine)
        if engine == "io_uring" and result.code == 9:
            self.skipTest(f"io_uring: {result.err.strip()}")
        self.expect_ok(result)
        self.assertEqual(result.json["engine"]["name"], engine)
        for loan in result.json["workers"][0]["loans"]:
            self.check_loan(loan)
            self.assertEqual(loan["rung"], rung)
            self.assertEqual(loan["gate"], gate)
            copied = loan["copied_bytes"]
            self.assertEqual(copied, 0) if rung == "vmm" else self.assertGreaterEqual(copied, 300001)

    def test_a_worker_without_a_device(self):
        for size in (0, 1, 100_003):
            with self.subTest(size=size):
                report = self.demo("--cpu-worker", "--size", size)
                self.assertEqual({loan["memory"] for loan in report["workers"][0]["loans"]}, {"host"})

    def test_fill(self):
        for size in (0, 1, 4097, "64KiB", "5MiB"):
            with self.subTest(size=size):
                report = self.demo("--fill", "--size", size)
                self.assertEqual([loan["access"] for loan in report["workers"][0]["loans"]], ["write"])
        self.demo("--fill", "--cpu-worker", "--size", "70001")

    def test_no_room_for_the_canary_is_said_to_be_that(self):
        result = self.run_cli("demo", "--fill", "--size", "62MiB", env={"GPULOAN_SIM_MEMORY_MIB": "64"})
        self.expect(result, "device-memory", "the canary of vmm with peer", "could not be done: arena: no device memory for ")

    def test_a_worker_that_crashes(self):
        result = self.run_cli("demo", "--fault", "crash", "--size", "64KiB")
        self.expect(result, "peer-lost", "gpuloan demo: worker 1 (pid ")

    def test_a_worker_that_crashes_leaves_the_others_alone(self):
        result = self.run_cli("demo", "--json", "--fault", "crash", "--size", "64KiB", "--workers", 3)
        self.expect(result, "peer-lost", "worker 1")
        self.assertEqual([worker["ok"] for worker in result.json["workers"]], [False, True, True])

    def test_a_worker_that_hangs(self):
        result = self.run_cli("demo", "--fault", "hang", "--size", "64KiB", "--timeout", "2")
        self.expect(result, "timeout", "worker 1", "did not finish within 2 s")

    def test_a_worker_that_fails_or_lies(self):
        self.expect(self.run_cli("demo", "--fault", "fail"), "loan-failed", "worker 1", "GPULOAN_ERR_")
        self.expect(self.run_cli("demo", "--fault", "corrupt"), "loan-failed", "SHA-256")
        self.expect(self.run_cli("demo", "--fault", "corrupt", "--fill"), "loan-failed", "pattern")

    def test_driver_auto_says_loudly_what_it_took(self):
        env = {"GPULOAN_DRIVER": "real"}
        result = self.expect_ok(self.run_cli("demo", "--driver", "auto", "--size", "4KiB", env=env))
        first = result.out.splitlines()[0]
        self.assertTrue("SIMULATED" in first or "real driver" in first, result.out)

    def test_no_driver(self):
        result = self.run_cli("demo", "--driver", str(self.folder / "libcuda.so.1"))
        self.expect(result, "no-driver", "libcuda.so.1")
        if not os.path.exists("/dev/nvidiactl"):
            result = self.run_cli("demo", env={"GPULOAN_DRIVER": ""})
            self.expect(result, "no-driver", "--driver sim")

    # C10
    def test_missing_features_fall_to_the_next_gate_with_a_reason(self):
        for without, gate in (("memops", "event"), ("memops,ipc-events", "host")):
            for loan in self.demo(env={"GPULOAN_SIM_WITHOUT": without})["workers"][0]["loans"]:
                self.assertEqual(loan["gate"], gate)
                self.assertIn("memop", loan["gate_reason"])

    def test_a_device_without_vmm(self):
        """Never a crash or a hang: either the host rung carries the loans, with the reason, or the sentence says why not."""
        result = self.run_cli("demo", "--json", env={"GPULOAN_SIM_WITHOUT": "vmm"})
        if result.code != 0:
            self.expect(result, "unsupported", "vmm rung")
            return
        for loan in result.json["workers"][0]["loans"]:
            self.assertEqual(loan["rung"], "host")
            self.assertIn("vmm", loan["rung_reason"])

    # D8
    def test_no_host_memory_can_be_locked(self):
        for loan in self.demo(env={"GPULOAN_SIM_PIN_LIMIT_KIB": "0"})["workers"][0]["loans"]:
            self.assertEqual((loan["rung"], loan["gate"]), ("host", "event"))
            self.assertIn("RLIMIT_MEMLOCK", loan["rung_reason"])
            self.assertIn("vmm: its canary failed", loan["rung_reason"])

    def test_out_of_device_memory(self):
        result = self.run_cli("demo", "--size", "64MiB", env={"GPULOAN_SIM_MEMORY_MIB": "16"})
        self.expect(result, "device-memory")


if __name__ == "__main__":
    unittest.main()
