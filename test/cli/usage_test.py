#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Help, usage errors, JSON everywhere, and the exit codes: --help and gpuloan(1) list the same ones."""
import json
import os
import pathlib
import re
import unittest

from cli import CliTest, EXIT

COMMANDS = ("demo", "canary", "probe", "lend", "borrow", "bench")
SOURCE = pathlib.Path(os.environ["GPULOAN_TEST_SOURCE"])


class UsageTest(CliTest):
    def test_help(self):
        self.assertIn("Usage: gpuloan", self.expect_ok(self.run_cli("--help")).out)
        for command in COMMANDS:
            text = self.expect_ok(self.run_cli(command, "--help")).out
            for option in ("--json", "--driver", "--timeout", "--help"):
                self.assertIn(option, text)
            self.assertTrue(text.startswith(f"Usage: gpuloan {command}"))
            self.assertTrue(all(len(line) <= 120 for line in text.splitlines()), text)
            seconds = re.findall(r"--timeout SECONDS .*default (\d+)$", text, re.MULTILINE) + re.findall(r"(\d+) seconds by default", text)
            self.assertEqual(seconds, ["600" if command == "bench" else "60"])

    def test_exit_codes_are_those_of_the_manual_page(self):
        text = self.expect_ok(self.run_cli("lend", "--help")).out
        shown = dict(re.findall(r"^ +(\d+)  (.+)$", text[text.index("Exit codes:"):], re.MULTILINE))
        page = (SOURCE / "docs/man/gpuloan.1.scd").read_text()
        section = page[page.index("# EXIT STATUS"):page.index("# ENVIRONMENT")]
        listed = re.findall(r"^\*(\d+)(?:\+N)?\* ([a-z-]+)\n\t(.+)\.$", section, re.MULTILINE)
        self.assertEqual(set(shown), {code for code, _, _ in listed})
        for code, name, meaning in listed:
            if code != "128":
                self.assertEqual(shown[code].lower(), meaning.lower())
                self.assertEqual(EXIT.get(name, int(code)), int(code))

    def test_manual_page_has_every_option(self):
        page = (SOURCE / "docs/man/gpuloan.1.scd").read_text()
        for command in COMMANDS:
            for option in re.findall(r"^  (--[a-z-]+)", self.run_cli(command, "--help").out, re.MULTILINE):
                self.assertIn(f"*{option}*", page, f"{command} {option}")

    def test_probe_of_one_device(self):
        self.env["GPULOAN_SIM_DEVICES"] = "3"
        ordinals = lambda *arguments: [device["ordinal"] for device in
                                       self.expect_ok(self.run_cli("probe", "--json", *arguments)).json["devices"]]
        self.assertEqual(ordinals(), [0, 1, 2])
        self.assertEqual(ordinals("--device", "1"), [1])
        self.assertEqual(self.run_cli("probe", "--device", "3").code, EXIT["no-driver"])

    def test_version(self):
        self.assertRegex(self.expect_ok(self.run_cli("--version")).out, r"\Agpuloan \d+\.\d+\.\d+\n\Z")

    def test_usage_errors(self):
        for arguments, texts in (
            ((), ("",)),
            (("lendd",), ("did you mean 'lend'?",)),
            (("demo", "--worker", "3"), ("unknown option '--worker'", "did you mean '--workers'?")),
            (("demo", "--workers", "0"), ("'--workers'", "'0' is not a number from 1 to 256")),
            (("demo", "--size", "1.5MiB"), ("'--size'", "is not a size")),
            (("demo", "--rung", "pools"), ("'--rung'", "vmm, pool, ipc, host")),
            (("demo", "--timeout", "soon"), ("'--timeout'", "seconds")),
            (("demo", "a", "b"), ("only one FILE",)),
            (("demo", ""), ("FILE is empty",)),
            (("demo", "a", "--size", "3"), ("exclude each other",)),
            (("lend", "--from", "x"), ("--socket PATH or --fd N",)),
            (("lend", "--socket", "s", "--fd", "3", "--from", "x"), ("--socket PATH or --fd N",)),
            (("lend", "--socket", "s"), ("--from FILE",)),
            (("borrow", "--socket", "s"), ("--to FILE",)),
            (("borrow", "--fd", "3", "--to", "x", "--key-fd", "4"), ("needs no key",)),
            (("probe", "extra"), ("unexpected argument 'extra'",)),
            (("demo-worker",), ("gpuloan demo",)),
            (("canary", "--serve", "--worker", "x"), ("exclude each other",)),
            (("canary", "--worker", ""), ("'--worker'", "is empty")),
            (("canary", "--fd", "4"), ("--fd belongs to --serve",)),
            (("canary", "--experimental-pool", "--rung", "vmm"), ("exclude each other",)),
            (("probe", "--step-timeout", "3"), ("--step-timeout belongs to --import-limit",)),
            (("probe", "--bogus"), ("unknown option '--bogus'. See 'gpuloan probe --help'.",)),
            (("canary", "vmm"), ("unexpected argument 'vmm'",)),
        ):
            with self.subTest(arguments=arguments):
                self.expect(self.run_cli(*arguments), "usage", *texts)

    def test_errors_as_json(self):
        result = self.run_cli("lend", "--json", "--socket", self.folder / "s", "--from", self.folder / "gone")
        self.expect(result, "file")
        self.assertEqual({name: result.json[name] for name in ("command", "ok", "exit_code", "exit_name")},
                         {"command": "lend", "ok": False, "exit_code": 8, "exit_name": "file"})
        self.assertIn("No such file", result.json["error"])
        self.assertEqual(self.run_cli("demo", "--json", "--nonsense").json["exit_name"], "usage")

    def test_probe(self):
        report = self.expect_ok(self.run_cli("probe", "--json", env={"GPULOAN_SIM_DEVICES": "3"})).json
        self.assertTrue(report["driver"]["simulated"])
        self.assertEqual(len(report["devices"]), 3)
        self.assertEqual(len({device["uuid"] for device in report["devices"]}), 3)
        self.assertTrue(all(floor["present"] for device in report["devices"] for floor in device["floors"]))
        self.assertIn("11.4", report["minimum_driver"])
        self.assertIn("io_uring", [fact["name"] for fact in report["kernel"]["facilities"]])
        text = self.expect_ok(self.run_cli("probe")).out
        for word in ("SIMULATED driver", "minimum", "vmm", "memops", "io_uring", "GPU-"):
            self.assertIn(word, text)

    # G5, G7, G11
    def test_probe_of_several_devices(self):
        env = {"GPULOAN_SIM_DEVICES": "3", "GPULOAN_SIM_PEERS": "0-1,2>0", "GPULOAN_SIM_COMPUTE_MODE": "exclusive"}
        report = self.expect_ok(self.run_cli("probe", "--json", env=env)).json
        self.assertEqual([device["peers"] for device in report["devices"]], [[1], [0], [0]])
        self.assertEqual([device["compute_mode"] for device in report["devices"]], [3, 3, 3])
        text = self.expect_ok(self.run_cli("probe", env=env)).out
        for words in ("peer access to 1; none to 2", "compute mode exclusive process: only one side can use the device; nvidia-smi -c DEFAULT, or MPS, lets both"):
            self.assertIn(words, text)
        self.assertIn("peer access none to 1: ", self.expect_ok(self.run_cli("probe", env={**env, "GPULOAN_SIM_DEVICES": "2", "GPULOAN_SIM_PEERS": "none"})).out)
        uuid = "MIG-7770756c-6f61-6e00-7369-6d0000000002"
        slice_only, = self.expect_ok(self.run_cli("probe", "--json", env={"GPULOAN_SIM_MIG": "2", "CUDA_VISIBLE_DEVICES": uuid})).json["devices"]
        self.assertEqual((slice_only["uuid"], slice_only["peers"]), (uuid, []))

    def test_probe_says_what_is_lost(self):
        env = {"GPULOAN_SIM_WITHOUT": "vmm,memops"}
        device, = self.expect_ok(self.run_cli("probe", "--json", env=env)).json["devices"]
        lost = {floor["name"]: floor["lost"] for floor in device["floors"] if not floor["present"]}
        self.assertEqual(set(lost), {"vmm", "memops"})
        self.assertNotIn("", lost.values())
        self.assertNotEqual(device["floor_reason"], "")
        self.assertIn("NO   lost: ", self.expect_ok(self.run_cli("probe", env=env)).out)

    # K3: without vmm the ipc rung is still there, and nothing says otherwise.
    def test_probe_of_a_device_without_vmm(self):
        text = self.expect_ok(self.run_cli("probe", env={"GPULOAN_SIM_PROFILE": "vgpu"})).out
        self.assertIn("vmm            NO   lost: zero-copy loans of the arena: the host rung copies them\n", text)
        self.assertIn("ipc-memory     yes", text)
        self.assertIn("missing: vmm: the arena is not lent without a copy (vmm rung): cuMemGetAllocationGranularity", text)

    # K5
    def test_probe_under_mps_says_what_is_lost_with_it(self):
        plain, = self.expect_ok(self.run_cli("probe", "--json")).json["devices"]
        self.assertEqual((plain["mps"], plain["mps_lost"]), (False, ""))
        self.assertTrue(all(floor["usable"] for floor in plain["floors"]))
        self.assertIn("\n  mps            no\n", self.expect_ok(self.run_cli("probe")).out)
        env = {"GPULOAN_SIM_MPS": "1"}
        device, = self.expect_ok(self.run_cli("probe", "--json", env=env)).json["devices"]
        self.assertTrue(device["mps"])
        self.assertIn("a dead client's work", device["mps_lost"])
        unusable = {floor["name"]: floor["lost"] for floor in device["floors"] if not floor["usable"]}
        self.assertEqual(set(unusable), {"foreign-vmm", "ipc-memory", "pools"})
        self.assertNotIn("", unusable.values())
        self.assertTrue(all(floor["present"] for floor in device["floors"]))
        text = self.expect_ok(self.run_cli("probe", env=env)).out
        self.assertIn("mps            YES  lost: the ipc and pool rungs", text)
        self.assertIn("ipc-memory     NO   lost: the ipc rung: cuMemAlloc memory is copied by the host rung (there, and not used under MPS)", text)
        self.assertIn("vmm            yes", text)
        # It is what lend does.
        report = self.expect_ok(self.run_cli("canary", "--json", "--experimental-pool", env=env)).json
        verified = {test["kind"] for test in report["tests"] if test["verdict"].endswith("verified")}
        self.assertEqual(verified, {"vmm", "host"})

    # G11
    def test_exclusive_mode_says_what_to_do(self):
        for mode in ("exclusive", "prohibited"):
            result = self.run_cli("demo", env={"GPULOAN_SIM_COMPUTE_MODE": mode})
            self.assertNotEqual(result.code, 0)
            self.assertIn("nvidia-smi -c DEFAULT", result.err, str(result))

    def test_probe_without_a_driver_still_says_what_it_can(self):
        result = self.run_cli("probe", "--driver", self.folder / "libcuda.so.1")
        self.expect(result, "no-driver")
        self.assertIn("io_uring", result.out)
        report = self.run_cli("probe", "--json", env={"GPULOAN_SIM_DEVICES": "0"})
        self.assertEqual(report.code, EXIT["no-driver"], str(report))
        self.assertEqual(json.loads(report.out)["devices"], [])


if __name__ == "__main__":
    unittest.main()
