#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""GPULOAN_TRACE: the steps of every loan, in a file that trace viewers and scripts read."""
import json
import os
import stat
import unittest

from cli import EXIT, CliTest, STEPS


class TraceTest(CliTest):
    def events(self, path):
        return json.loads(path.read_text().rstrip().rstrip(",") + "]")

    def test_steps_of_every_loan(self):
        path = self.folder / "trace.json"
        env = {"GPULOAN_TRACE": str(path)}
        for run in (1, 2):  # the second one appends
            report = self.expect_ok(self.run_cli("demo", "--json", "--size", "70000", "--workers", 2, env=env)).json
            events = self.events(path)
            workers = {worker["pid"] for worker in report["workers"]}
            mine = [event for event in events if event["pid"] in workers]
            loans = [event for event in mine if "loan" in event["args"]]
            self.assertEqual({event["pid"] for event in loans}, workers)
            demo = [event for event in loans if not event["name"].startswith("canary")]
            self.assertEqual(sorted(event["name"] for event in demo), ["read 70000"] * 2 + ["write 70000"] * 2)
            self.assertGreater(len(loans), len(demo), "canaries are loans, too")
            for event in loans:
                arguments = event["args"]
                self.assertEqual((arguments["outcome"], arguments["text"], arguments["turns"]), ("GPULOAN_OK", "", 1))
                end = event["ts"] + event["dur"]
                inner = [one for one in mine if one is not event and (one["pid"], one["tid"]) == (event["pid"], event["tid"]) and
                         event["ts"] - 0.01 <= one["ts"] and one["ts"] + one["dur"] <= end + 0.01]
                self.assertEqual(inner[-1]["name"], "to RELEASE")
                names = [one["name"].removeprefix("to ") for one in inner]
                self.assertEqual(names, [step for step in STEPS if step in names])  # in the contract's order
                self.assertTrue({"DONE", "ACK"} <= set(names), names)
                self.assertAlmostEqual(sum(one["dur"] for one in inner), event["dur"], delta=0.1)
            for event in demo:
                self.assertEqual(event["args"]["bytes"], 70000)
                seen = [loan for worker in report["workers"] if worker["pid"] == event["pid"] for loan in worker["loans"]]
                self.assertIn((event["args"]["rung"], event["args"]["gate"]), [(loan["rung"], loan["gate"]) for loan in seen])
            self.assertEqual(len({(event["pid"], event["args"]["loan"]) for event in events if "loan" in event["args"]}), run * len(loans))
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)

    def test_an_end_that_is_not_good(self):
        path = self.folder / "trace.json"
        result = self.run_cli("demo", "--size", "70000", "--fault", "crash", env={"GPULOAN_TRACE": str(path)})
        self.assertEqual(result.code, EXIT["peer-lost"], result)
        lost = [event for event in self.events(path) if event["args"].get("outcome") == "GPULOAN_ERR_PEER_LOST"]
        self.assertTrue(lost)
        self.assertTrue(all(event["args"]["text"] for event in lost))

    def test_file_that_cannot_be_written(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        cases = ((self.folder / "missing" / "trace.json", "No such file"), (self.folder, "Is a directory"), (fifo, "No such device"))
        for path, why in cases:
            with self.subTest(path=path):
                env = {"GPULOAN_TRACE": str(path), "GPULOAN_LOG": "warning"}
                result = self.expect_ok(self.run_cli("demo", "--size", "70000", env=env))
                self.assertIn(f"GPULOAN_TRACE: cannot write {path}: {why}", result.err)
                self.assertIn("nothing is traced", result.err)


if __name__ == "__main__":
    unittest.main()
