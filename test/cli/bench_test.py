#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan bench: every case runs on the simulated driver and reports what it compared. No time is judged here."""
import unittest

from cli import CliTest, EXIT


class BenchTest(CliTest):
    def test_every_case(self):
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--size", "64KiB", "--size", "1000004"))
        rows = result.json["comparisons"]
        self.assertEqual([(row["case"], row["bytes"]) for row in rows],
                         [(case, size) for case in ("turns", "loans", "offsets", "copies") for size in (65536, 1000004)])
        for row in rows:
            ratio = "rate_ratio" if row["case"] == "copies" else "time_ratio"
            for spread in (row["floor_us"], row["gpuloan_us"], row[ratio]):
                self.assertEqual(len(spread), 3)
                self.assertEqual(spread, sorted(spread))
                self.assertGreater(spread[0], 0)

    def test_one_case_on_another_gate(self):
        text = self.expect_ok(self.run_cli("bench", "--quick", "--case", "loans", "--size", "4KiB", "--gate", "host", "--engine", "epoll")).out
        self.assertIn("SIMULATED", text)
        self.assertIn("engine  epoll", text)
        self.assertRegex(text, r"(?m)^  loans +4\.0 KiB")

    def test_refusals(self):
        for arguments in (("--size", "10"), ("--size", "0"), ("--case", "nothing"), ("extra",)):
            self.assertEqual(self.run_cli("bench", *arguments).code, EXIT["usage"], arguments)


if __name__ == "__main__":
    unittest.main()
