#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""J8: the oldest driver that the documents name is the oldest one that lib/driver/symbols.inc can work with. What they say is compared
with the table; then the simulated driver of that version, with no function that came later, lends memory end to end, and the one of the
version before is refused with the name of what is missing. GPULOAN_TEST_OLD names those two libraries."""
import os
import pathlib
import re
import unittest

import cli

SOURCE = pathlib.Path(os.environ["GPULOAN_TEST_SOURCE"])
MINIMUM = 11040
OLD = dict(pair.split("=") for pair in os.environ["GPULOAN_TEST_OLD"].split(","))  # version: library
DRIVERS = {11040: "470", 11070: "515"}  # the branch that came with a CUDA version, by NVIDIA's release notes

ROW = re.compile(r"^GPULOAN_CUDA\((Required|Optional), (\d+), (\w+), (\w+), (\w+),", re.MULTILINE)
TABLE = [(need, int(since), group, name, exported)
         for need, since, group, name, exported in ROW.findall((SOURCE / "lib/driver/symbols.inc").read_text())]


def text(version):
    return f"{version // 1000}.{version % 1000 // 10}"


def newest(rows):
    since = max(row[1] for row in rows)
    return since, [row for row in rows if row[1] == since]


class MinimumDriver(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.minimum, self.set_by = newest([row for row in TABLE if row[0] == "Required"])

    def test_documents(self):
        self.assertGreater(len(TABLE), 50)
        self.assertEqual(self.minimum, MINIMUM, "meson.build makes its libraries for this version")
        memops, _ = newest([row for row in TABLE if row[2] == "MemOps"])
        floors = (SOURCE / "docs/floors.md").read_text()
        needed = f"CUDA {text(self.minimum)} (driver {DRIVERS[self.minimum]}) or newer; the memop gate needs {text(memops)} (driver {DRIVERS[memops]})"
        self.assertIn(needed, floors)
        self.assertIn(f"must support CUDA {text(self.minimum)} or newer; the fastest gate needs {text(memops)}", (SOURCE / "README.md").read_text())
        probe = self.run_cli("probe")
        self.assertIn(f"CUDA {text(self.minimum)} (driver {DRIVERS[self.minimum]}); the memop gate needs {text(memops)} (driver {DRIVERS[memops]})",
                      probe.out, str(probe))

    def test_groups(self):
        """The table of groups: newest `since`, and who sets it."""
        floors = (SOURCE / "docs/floors.md").read_text()
        rows = {group: (since, who) for group, since, who in re.findall(r"^\| ([^|]+) \| (\d+\.\d) \| ([^|]+) \|", floors, re.MULTILINE)}
        groups = {row[2] for row in TABLE if row[0] == "Optional"}
        self.assertEqual({name.split(":")[0] for name in rows}, groups | {"required"})
        for name, (since, who) in rows.items():
            mine = [row for row in TABLE if (row[0] == "Required" if name.startswith("required") else row[2] == name)]
            wanted, setters = newest(mine)
            self.assertEqual(since, text(wanted), name)
            named = re.findall(r"`(\w+)`", who)
            if who.strip() != "all":
                self.assertEqual(sorted(named), sorted(row[4] for row in setters), name)

    def old(self, version):
        self.env.update(GPULOAN_DRIVER=OLD[str(version)], GPULOAN_SIM_VERSION=str(version), GPULOAN_SIM_QUIRKS="attribute:122,attribute:125,attribute:133")

    def test_oldest(self):
        self.old(self.minimum)
        demo = self.run_cli("demo", "--json")
        self.assertEqual(demo.code, 0, str(demo))
        loans = [loan for worker in demo.json["workers"] for loan in worker["loans"]]
        self.assertEqual({(loan["rung"], loan["gate"]) for loan in loans}, {("vmm", "event")}, str(demo))
        probe = self.run_cli("probe", "--json")
        self.assertEqual(probe.code, 0, str(probe))
        self.assertIn("cuStreamWriteValue64", probe.out)

    def test_older(self):
        self.old(self.minimum - 10)
        for words in (["probe"], ["demo"]):
            refused = self.run_cli(*words)
            self.assertEqual(refused.code, cli.EXIT["no-driver"], str(refused))
            said = refused.out + refused.err
            for row in self.set_by:
                self.assertIn(row[4], said, str(refused))
            self.assertIn(text(self.minimum - 10), said, str(refused))


if __name__ == "__main__":
    unittest.main()
