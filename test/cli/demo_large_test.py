#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan demo with sizes that do not fit a piece: eight workers with 256 MiB each, and 3 GiB with one. Needs about
7 GiB of memory for the simulated devices; exits 77 where there is less."""
import sys
import unittest

from cli import CliTest

NEEDED = 7 << 30


def available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


class LargeDemoTest(CliTest):
    def check(self, *arguments):
        report = self.expect_ok(self.run_cli("demo", "--json", "--timeout", "110", *arguments)).json
        for worker in report["workers"]:
            self.assertTrue(worker["ok"])
            for loan in worker["loans"]:
                self.check_loan(loan)

    def test_eight_workers_with_256_mib_each(self):
        self.check("--workers", 8, "--size", "256MiB")

    def test_three_gib(self):
        self.check("--size", "3GiB")

    def test_filled_three_gib_is_checked_at_spots(self):
        self.check("--fill", "--size", "3GiB")


if __name__ == "__main__":
    if available() < NEEDED:
        print(f"needs {NEEDED >> 30} GiB of memory")
        sys.exit(77)
    unittest.main()
