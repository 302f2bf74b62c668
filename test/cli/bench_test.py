#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan bench: every case runs on the simulated driver and reports what it compared. No time is judged here."""
import re
import unittest
import xml.etree.ElementTree

from cli import CliTest, EXIT


class BenchTest(CliTest):
    def test_every_case_of_a_device(self):
        cases = ("--case", "turns", "--case", "loans", "--case", "offsets", "--case", "copies")
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--size", "64KiB", "--size", "1000004", *cases))
        rows = result.json["comparisons"]
        self.assertEqual([(row["case"], row["bytes"]) for row in rows],
                         [(case, size) for case in ("turns", "loans", "offsets", "copies") for size in (65536, 1000004)])
        for row in rows:
            ratio = "rate_ratio" if row["case"] == "copies" else "time_ratio"
            for spread in (row["floor_us"], row["gpuloan_us"], row[ratio]):
                self.assertEqual(len(spread), 3)
                self.assertEqual(spread, sorted(spread))
                self.assertGreater(spread[0], 0)

    def test_one_loan_of_the_whole_device(self):
        # The card holds one of 300 MiB at a time, so each has to give its memory back before the next one.
        small = {"GPULOAN_SIM_MEMORY_MIB": "500"}
        for loop in ("thread", "caller"):
            result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "whole", "--size", "300MiB", "--loop", loop, env=small))
            row, = result.json["comparisons"]
            self.assertEqual((row["case"], row["bytes"]), ("whole", 300 << 20))
            for spread in (row["floor_us"], row["gpuloan_us"], row["time_ratio"]):
                self.assertEqual(spread, sorted(spread))
                self.assertGreater(spread[0], 0)
        self.expect(self.run_cli("bench", "--case", "whole", "--size", "600MiB", env=small), "device-memory", "600.0 MiB do not fit", "--size")

    def test_the_largest_loan(self):
        # 64 MiB of a card of 4000 are what fits() may miss.
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "fit", env={"GPULOAN_SIM_MEMORY_MIB": "4000"}))
        row, = result.json["comparisons"]
        self.assertEqual((row["case"], row["step_bytes"]), ("fit", 64 << 20))
        for name in ("floor_bytes", "gpuloan_bytes"):
            self.assertEqual(row[name][1] % (64 << 20), 0)
            self.assertLessEqual(row[name][1], 4000 << 20)
            self.assertGreater(row[name][1], 3600 << 20, "a probe did not give its memory back")
        self.assertGreaterEqual(row["size_ratio"][1], 0.95)
        self.assertLessEqual(row["size_ratio"][1], 1.0)

    def test_both_sides_compute(self):
        # The work of the parent's stream comes before READY on both ways: no pair is shorter than both streams' lag.
        lag = 3000
        env = {"GPULOAN_SIM_LAG_US": str(lag)}
        row, = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "compute", "--size", "64KiB", env=env)).json["comparisons"]
        self.assertEqual((row["case"], row["bytes"]), ("compute", 65536))
        for spread in (row["floor_us"], row["gpuloan_us"]):
            self.assertGreater(spread[0], 2 * lag)

    def test_the_pool_rung(self):
        row, = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "pool", "--size", "8MiB")).json["comparisons"]
        self.assertEqual((row["case"], row["bytes"]), ("pool", 8 << 20))
        for spread in (row["floor_us"], row["gpuloan_us"], row["time_ratio"]):
            self.assertEqual(spread, sorted(spread))
            self.assertGreater(spread[0], 0)
        # What would kill the importer is not tried.
        self.expect(self.run_cli("bench", "--case", "pool", "--size", "6GiB"), "unsupported", "5.1 GiB", "--size")
        self.expect(self.run_cli("bench", "--case", "pool", env={"GPULOAN_SIM_WITHOUT": "pools"}), "unsupported", "no memory pools")

    def test_the_control_plane(self):
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "acks", "--case", "roundtrip", "--case", "out"))
        self.assertIsNone(result.json["driver"])
        rows = result.json["comparisons"]
        names = [row["case"] for row in rows]
        ring = any("io_uring" in row["of"] for row in rows)
        self.assertEqual([names.count(name) for name in ("acks", "roundtrip", "out")], [5, 9, 4] if ring else [2, 6, 4])
        for row in rows:
            for spread in (row["floor_us"], row["gpuloan_us"], row["rate_ratio" if row["case"] == "acks" else "time_ratio"]):
                self.assertEqual(spread, sorted(spread))
                self.assertGreater(spread[0], 0)

    def test_one_case_on_another_gate(self):
        text = self.expect_ok(self.run_cli("bench", "--quick", "--case", "loans", "--size", "4KiB", "--gate", "host", "--engine", "epoll")).out
        self.assertIn("SIMULATED", text)
        self.assertIn("engine  epoll", text)
        self.assertRegex(text, r"(?m)^  loans +4\.0 KiB")

    def test_a_ratio_of_rates_says_so(self):
        text = self.expect_ok(self.run_cli("bench", "--quick", "--case", "turns", "--case", "copies", "--case", "acks", "--case", "roundtrip",
                                           "--size", "64KiB")).out
        kinds = re.findall(r"^  (turns|copies|acks|roundtrip) .* (time|rate)  ", text, re.MULTILINE)
        self.assertEqual(set(kinds), {("turns", "time"), ("copies", "rate"), ("acks", "rate"), ("roundtrip", "time")})
        self.assertEqual(text.count("the median of the ratios of neighbouring blocks"), 2)

    def test_the_start(self):
        # The streams' lag is in the canary and in the first work, and in neither the handshake nor the chunk.
        lag = 20_000
        path = self.folder / "run.svg"
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "startup", "--plot", path, env={"GPULOAN_SIM_LAG_US": str(lag)}))
        self.assertEqual(result.json["comparisons"], [])
        startup = result.json["startup"]
        self.assertEqual((startup["workers"], startup["canary"]), (3, "verified"))
        steps = {step["step"]: step["us"] for step in startup["steps"]}
        parts = [step["step"] for step in startup["steps"] if step["part_of_total"]]
        self.assertEqual(parts, ["handshake", "memory", "canary", "import", "work", "return"])
        self.assertEqual(set(steps) - set(parts), {"process", "total", "next loan"})
        for us in steps.values():
            self.assertEqual(us, sorted(us))
            self.assertGreater(us[0], 0)
        for name in ("canary", "work", "next loan"):
            self.assertGreater(steps[name][0], lag, name)
        self.assertLessEqual(sum(steps[name][0] for name in parts), steps["total"][2])
        svg = xml.etree.ElementTree.parse(path)
        drawn = [group for group in svg.iter("{http://www.w3.org/2000/svg}g") if group.get("class") == "step"]
        self.assertEqual(len(drawn), len(steps) - 1)

    def test_the_picture(self):
        path = self.folder / "run.svg"
        result = self.expect_ok(self.run_cli("bench", "--quick", "--json", "--case", "turns", "--case", "copies", "--case", "roundtrip",
                                             "--size", "64KiB", "--size", "1000004", "--plot", path))
        rows = result.json["comparisons"]
        text = path.read_text(encoding="utf-8")
        self.assertEqual([name.name for name in self.folder.glob("run.svg*")], ["run.svg"])
        self.assertEqual(text.count("http"), 1, "something from elsewhere beside the name of the format")
        svg = xml.etree.ElementTree.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        self.assertEqual((svg.tag, svg.get("version")), (space + "svg", "1.1"))
        drawn = [group for group in svg.iter(space + "g") if group.get("class") == "row"]
        self.assertEqual(len(drawn), len(rows))
        self.assertIn("SIMULATED driver", "".join(svg.itertext()))
        places = []
        for group, row in zip(drawn, rows):
            low, ratio, high = row.get("time_ratio") or row["rate_ratio"]
            title = group.find(space + "title").text
            self.assertTrue(title.startswith(row["case"]) and f": {ratio:.3f}, quartiles {low:.3f} to {high:.3f};" in title, title)
            left, dot = group.findall(space + "line")[0], group.find(space + "circle")
            self.assertLessEqual(float(left.get("x1")), float(dot.get("cx")))
            self.assertLessEqual(float(dot.get("cx")), float(left.get("x2")))
            better = (ratio < 1) == ("time_ratio" in row)
            self.assertEqual(dot.get("class"), "even" if low <= 1 <= high else "good" if better else "bad")
            places.append((ratio, float(dot.get("cx"))))
        places.sort()
        self.assertEqual([place for _, place in places], sorted(place for _, place in places), "not a scale")
        self.assertGreater(places[-1][1], places[0][1])

    def test_a_picture_that_cannot_be_written(self):
        for path in (self.folder / "missing" / "run.svg", self.folder):
            result = self.expect(self.run_cli("bench", "--plot", path), "file", str(path)) # all cases, unshortened: minutes
            self.assertLess(result.seconds, 10, "the run came first")
        self.expect(self.run_cli("bench", "--plot", "-"), "usage", "--plot")
        # A run that fails leaves nothing.
        self.expect(self.run_cli("bench", "--case", "pool", "--plot", self.folder / "run.svg", env={"GPULOAN_SIM_WITHOUT": "pools"}), "unsupported")
        self.assertEqual(list(self.folder.glob("run.svg*")), [])

    def test_refusals(self):
        for arguments in (("--size", "10"), ("--size", "0"), ("--case", "nothing"), ("extra",)):
            self.assertEqual(self.run_cli("bench", *arguments).code, EXIT["usage"], arguments)


if __name__ == "__main__":
    unittest.main()
