#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan probe --import-limit: the limit that the simulated driver was given is found, kept, used, and nothing is left."""
import json
import os
import stat
import subprocess
import sys
import unittest

from cli import CliTest, EXE, EXIT, SIM

MIB = 1 << 20
# Free bytes of device 0, as another process sees them.
LOOK = """
import ctypes as c, sys
cuda = c.CDLL(sys.argv[1])
context, free, total = c.c_void_p(), c.c_size_t(), c.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cuda.cuCtxPushCurrent_v2(context) == 0
assert cuda.cuMemGetInfo_v2(c.byref(free), c.byref(total)) == 0
print(free.value)
"""


class ImportLimitTest(CliTest):
    def setUp(self):
        super().setUp()
        self.cache = self.folder / "cache"
        # Room for the largest size that is tried and no more: a step that leaves its memory behind makes a later one fail.
        self.env.update(GPULOAN_SIM_MEMORY_MIB=str(9 * 1024 + 64), GPULOAN_LOG="warning")

    def free_bytes(self):
        return int(subprocess.run([sys.executable, "-c", LOOK, SIM], env=self.env, check=True, capture_output=True).stdout)

    def probe(self, *arguments, code="ok", **options):
        result = self.run_cli("probe", "--json", *arguments, **options)
        self.assertEqual(result.code, EXIT[code], str(result))
        return result

    def files(self):
        return [path for path in self.cache.rglob("*") if path.is_file()]

    def limit(self):
        device = self.probe().json["devices"][0]
        return device["pool_import_limit"] // MIB, device["pool_import_limit_source"]

    @unittest.skipIf(os.environ.get("GPULOAN_TEST_SANITIZED"), "this process, which looks at the free memory, has no sanitizer")
    def test_found_kept_and_used(self):
        self.assertEqual(self.limit(), (5248, "default"))
        before = self.free_bytes()
        result = self.probe("--import-limit")
        found = result.json["import_limit"]
        self.assertEqual(found["bytes"], 5248 * MIB)
        self.assertFalse(found["reached_upper"])
        self.assertEqual((found["lower_bytes"], found["upper_bytes"]), (2 * MIB, (8 * 1024 + 64) * MIB))
        self.assertEqual(found["device_bytes_missing"], 0)
        self.assertEqual(self.free_bytes(), before)
        self.assertEqual(result.err.count("MiB: fine") + result.err.count("MiB: the importer was killed by signal 11"), found["imports"])
        self.assertIn("import of 5248 MiB: fine", result.err)
        self.assertIn("import of 5250 MiB: the importer was killed by signal 11", result.err)
        self.assertEqual(result.json["devices"][0]["pool_import_limit_source"], "measured")
        self.assertEqual(self.limit(), (5248, "measured"))
        (path,) = self.files()
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertIn("\nlimit 5248 MiB\n", path.read_text())

    def test_another_limit(self):
        self.env["GPULOAN_SIM_IMPORT_LIMIT_MIB"] = "3071"  # odd: 3070 is the last of 2 MiB that works
        self.assertEqual(self.probe("--import-limit").json["import_limit"]["bytes"], 3070 * MIB)
        self.assertEqual(self.limit(), (3070, "measured"))
        text = self.expect_ok(self.run_cli("probe"))
        self.assertIn("3070 MiB for one allocation of a pool (measured)", text.out)

    def test_what_went_well_by_chance_is_too_large(self):
        self.env["GPULOAN_SIM_IMPORT_LIMIT_MIB"] = "3070:wavers"
        result = self.probe("--import-limit")
        self.assertEqual(result.json["import_limit"]["bytes"], 3070 * MIB)
        tried = [line.split("import of ")[1] for line in result.err.splitlines() if "import of 307" in line]
        died = "exited with code 1" if os.environ.get("GPULOAN_TEST_SANITIZED") else "was killed by signal 11"
        lucky, unlucky = (f"{tried[0].split(' MiB')[0]} MiB: {end}" for end in ("fine", "the importer " + died))
        self.assertIn(lucky.split(" ")[0], ("3072", "3074"))
        self.assertEqual([line.split(" (")[0] for line in tried if line.startswith(lucky[:4])], [lucky, unlucky])
        self.assertEqual(tried[-3:], ["3070 MiB: fine"] * 3)
        self.assertEqual(self.limit(), (3070, "measured"))

    def test_no_limit(self):
        self.env["GPULOAN_SIM_IMPORT_LIMIT_MIB"] = "0"
        found = self.probe("--import-limit").json["import_limit"]
        self.assertTrue(found["reached_upper"])
        self.assertEqual(found["bytes"], found["upper_bytes"])
        text = self.expect_ok(self.run_cli("probe", "--import-limit"))
        self.assertIn(f"no limit up to {8 * 1024 + 64} MiB; searched from 2 to {8 * 1024 + 64} MiB", text.out)

    def test_an_importer_that_fails_or_hangs(self):
        for end, said in (("fails", "the importer exited with code"), ("hangs", "no answer within 3 s")):
            with self.subTest(end):
                # 2048 MiB work, and the largest size that fits is 2050.
                self.env.update(GPULOAN_SIM_IMPORT_LIMIT_MIB=f"2048:{end}", GPULOAN_SIM_MEMORY_MIB=str(1024 + 2050))
                self.state.unlink(missing_ok=True)
                result = self.probe("--import-limit", "--step-timeout", "3")
                self.assertEqual(result.json["import_limit"]["bytes"], 2048 * MIB)
                self.assertIn("import of 2050 MiB: " + said, result.err)

    def test_no_descriptor_is_left(self):
        # One descriptor left behind by each of some 20 steps would be too many: the process needs 8 or less, and may have 18.
        limited = lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_NOFILE, (18, 18))
        process = subprocess.run([EXE, "probe", "--json", "--import-limit"], env=self.env, preexec_fn=limited, capture_output=True, text=True)
        self.assertEqual(process.returncode, 0, process.stderr)
        found = json.loads(process.stdout)["import_limit"]
        self.assertEqual(found["bytes"], 5248 * MIB)
        self.assertGreater(found["imports"], 15)

    def test_what_cannot_be_measured(self):
        self.env["GPULOAN_SIM_IMPORT_LIMIT_MIB"] = "5248:hangs"
        self.expect(self.probe("--import-limit", "--timeout", "1", code="timeout"), "timeout", "not found within 1 s")
        self.env.update(GPULOAN_SIM_WITHOUT="pools", GPULOAN_SIM_IMPORT_LIMIT_MIB="")
        self.expect(self.probe("--import-limit", code="unsupported"), "unsupported", "no pools that can be shared")
        self.env.update(GPULOAN_SIM_WITHOUT="", GPULOAN_SIM_MEMORY_MIB="1025")
        self.state.unlink()
        self.expect(self.probe("--import-limit", code="device-memory"), "device-memory", "no room to search in")
        self.assertEqual(self.files(), [])

    def test_a_limit_of_nothing_takes_the_place_of_a_larger_one(self):
        self.env["GPULOAN_SIM_IMPORT_LIMIT_MIB"] = "64"
        self.env["GPULOAN_SIM_MEMORY_MIB"] = "1124"
        self.probe("--import-limit")
        self.assertEqual(self.limit(), (64, "measured"))
        # An importer that does not even get a context says nothing.
        self.env["GPULOAN_SIM_COMPUTE_MODE"] = "exclusive"
        self.expect(self.probe("--import-limit", code="no-driver"), "no-driver", "could not begin", "CUDA_ERROR_DEVICE_UNAVAILABLE")
        self.assertEqual(self.limit(), (64, "measured"))
        del self.env["GPULOAN_SIM_COMPUTE_MODE"]
        self.env["GPULOAN_SIM_PROFILE"] = "pool-imports-die"
        result = self.probe("--import-limit")
        died = "exited with code 1" if os.environ.get("GPULOAN_TEST_SANITIZED") else "was killed by signal 11"
        self.assertEqual(result.err.count("import of 2 MiB: the importer " + died), 3, result.err)
        self.assertEqual(result.json["import_limit"]["bytes"], 0)
        self.assertIn("not even 2 MiB", result.json["import_limit"]["none"])
        self.assertEqual(self.limit(), (0, "measured"))
        del self.env["GPULOAN_SIM_PROFILE"]
        self.assertIn("import limit   none: no memory of a pool can be imported", self.expect_ok(self.run_cli("probe")).out)
        report = self.expect_ok(self.run_cli("canary", "--json", "--rung", "pool")).json
        reasons = {test["reason"] for test in report["tests"] if test["kind"] == "pool"}
        self.assertEqual(len(reasons), 1, reasons)
        self.assertIn("no memory of a pool can be imported by another process (measured on this device and driver)", reasons.pop())
        self.env["GPULOAN_SIM_PROFILE"] = "pool-imports-die"
        text = self.expect_ok(self.run_cli("probe", "--import-limit"))
        self.assertIn("import limit of device 0: none: not even 2 MiB of a pool can be imported by another process; 3 imports were tried", text.out)

    def test_a_result_that_cannot_be_kept_is_said(self):
        self.env.update(GPULOAN_SIM_IMPORT_LIMIT_MIB="64", GPULOAN_SIM_MEMORY_MIB="1124", XDG_CACHE_HOME=str(self.folder / "no" / "such"))
        self.expect(self.run_cli("probe", "--import-limit"), "system", "the import limit is 64 MiB", "cannot be kept in")

    def test_a_stale_file_is_not_used(self):
        self.env.update(GPULOAN_SIM_IMPORT_LIMIT_MIB="64", GPULOAN_SIM_MEMORY_MIB="1124")
        self.probe("--import-limit")
        self.assertEqual(self.limit(), (64, "measured"))
        self.env["GPULOAN_SIM_VERSION"] = "13010"
        result = self.probe()
        self.assertEqual(result.json["devices"][0]["pool_import_limit_source"], "default")
        self.assertEqual(result.err.count("is not used: it is damaged, or was made for another driver"), 1, result.err)


if __name__ == "__main__":
    unittest.main()
