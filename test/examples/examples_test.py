#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The examples for Python parents run and do what they say, with the worker in Python and in C; so do the scripts of test/gpu without
a framework; the programs in the pages about Python are complete. Arguments: the source tree, the library, the C compiler."""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT, LIBRARY, COMPILER = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), shlex.split(sys.argv[3])
EXAMPLES, GPU = ROOT / "docs/examples", ROOT / "test/gpu"
ENVIRONMENT = dict(os.environ, GPULOAN_LIBRARY=str(LIBRARY), PYTHONPATH=str(ROOT / "lib/python"))
folder = None


def run(*command, limit=120, **environment):
    """(exit code, lines of stdout, stderr)"""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit, env=dict(ENVIRONMENT, **environment))
    return result.returncode, result.stdout.splitlines(), result.stderr


def setUpModule():
    global folder
    folder = tempfile.TemporaryDirectory(prefix="gpuloan-examples-")
    subprocess.run([*COMPILER, "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", str(EXAMPLES / "worker.c"), "-o", str(c_worker()),
                    f"-I{ROOT / 'include'}", f"-L{LIBRARY.parent}", "-lgpuloan", f"-Wl,-rpath,{LIBRARY.parent}", "-ldl"], check=True)


def tearDownModule():
    folder.cleanup()


def c_worker():
    return pathlib.Path(folder.name) / "worker"


class Examples(unittest.TestCase):
    def runtime(self, *command):
        code, lines, errors = run(sys.executable, EXAMPLES / "worker_runtime.py", *command)
        self.assertEqual(code, 0, "\n".join(lines) + errors)
        self.assertEqual(sum(line.startswith("ok: ") for line in lines), 11, lines)
        self.assertEqual(sum(line.endswith(" started") for line in lines), 2, "one worker, and one after its crash")
        self.assertTrue(any("(-9)" in line for line in lines), lines)

    def test_worker_in_python(self):
        self.runtime()

    def test_worker_in_c(self):
        self.runtime(c_worker())

    def test_a_worker_without_a_parent(self):
        code, _, errors = run(c_worker())
        self.assertEqual((code, "GPULOAN_FD" in errors), (2, True))


class Qualify(unittest.TestCase):
    def qualify(self, **environment):
        code, lines, errors = run(sys.executable, EXAMPLES / "qualify.py", "--", sys.executable, "none", **environment)
        rows = [line for line in lines if re.match(r"(not )?ok \d+ - ", line)]
        self.assertIn(f"1..{len(rows)}", lines, errors)
        return code, rows, lines[-1]

    def test_all_good(self):
        code, rows, last = self.qualify()
        self.assertEqual((code, last), (0, "# all rungs and cases are good"))
        self.assertEqual(len(rows), 33)
        self.assertFalse([row for row in rows if not row.startswith("ok ") or "SKIP" in row])

    def test_legacy_handles_that_do_not_open(self):
        code, rows, last = self.qualify(GPULOAN_SIM_FAIL="cuIpcOpenMemHandle:1+:999")
        self.assertEqual(code, 1)
        self.assertRegex(last, r"^# FAILED: ipc uint8, 5000 elements: .*canary failed")
        bad = [row for row in rows if row.startswith("not ok")]
        self.assertTrue(bad and all(" - ipc " in row for row in bad), bad)

    def with_torch(self, words, *command, driver="sim", parent=False):
        """Runs it where a stand-in for a PyTorch that cannot use a GPU can be imported: at the worker, or at the parent."""
        torch = pathlib.Path(folder.name) / "site" / "torch.py"
        torch.parent.mkdir(exist_ok=True)
        torch.write_text("import types\n__version__ = '2.9.1+cpu'\nversion = types.SimpleNamespace(cuda=None)\n"
                         "cuda = types.SimpleNamespace(is_available=lambda: False)\n")
        python = pathlib.Path(folder.name) / "python"
        python.write_text(f"#!/bin/sh\nPYTHONPATH={torch.parent} exec {sys.executable} \"$@\"\n")
        python.chmod(0o755)
        code, lines, errors = run(python if parent else sys.executable, *command, EXAMPLES / "qualify.py", "--",
                                  sys.executable if parent else python, *words, GPULOAN_DRIVER=driver)
        return code, lines, errors

    def test_a_framework_without_cuda(self):
        code, lines, errors = self.with_torch(["torch"])
        self.assertEqual((code, lines[1:]), (77, ["1..0 # SKIP the worker's torch 2.9.1+cpu: it is built without CUDA"]), errors)

    def test_a_framework_without_cuda_beside_the_simulated_driver(self):
        code, lines, errors = self.with_torch([])
        self.assertEqual((code, lines[-1]), (0, "# all rungs and cases are good"), errors)
        self.assertIn("ok 34 - worker torch 2.9.1+cpu # SKIP it is built without CUDA", lines)
        self.assertFalse([line for line in lines if line.startswith("not ok")])

    def test_what_is_not_there(self):
        for words, why in (((sys.executable, "torch"), "cannot import torch: ModuleNotFoundError"), (("/nowhere/python",), "cannot be started"),
                           ((sys.executable, "tensorflow"), "tensorflow is no framework: one of torch, cupy, jax")):
            code, _, errors = run(sys.executable, EXAMPLES / "qualify.py", "--", *words)
            self.assertEqual(code, 1)
            self.assertRegex(errors, "^Bail out! .*" + why)

    def test_a_worker_that_does_not_start(self):
        code, lines, _ = run(sys.executable, EXAMPLES / "qualify.py", "--", "/bin/false")
        self.assertEqual(code, 1)
        self.assertRegex(lines[-1], "^# FAILED: vmm the worker starts: ")


class Scripts(unittest.TestCase):
    def last(self, limit, script, *arguments):
        code, lines, errors = run(sys.executable, GPU / script, LIBRARY, *arguments, limit=limit)
        return code, lines, lines[-1] if lines else errors

    def test_frameworks(self):
        code, lines, last = self.last(200, "frameworks.py", c_worker(), "--parent", "plain", "--workers", "plain,c", "--quick")
        self.assertEqual((code, last), (0, "30 passed, 0 failed"), "\n".join(lines))

    def test_frameworks_with_a_worker_that_ends(self):
        code, lines, last = self.last(60, "frameworks.py", "/bin/true", "--parent", "plain", "--workers", "c", "--quick")
        self.assertEqual((code, last), (1, "0 passed, 1 failed"), "\n".join(lines))

    def test_results(self):
        code, lines, last = self.last(200, "results.py", "--parent", "plain", "--results", "200", "--kills", "5")
        self.assertEqual((code, last), (0, "7 passed, 0 failed"), "\n".join(lines))

    def test_peers(self):
        picture = pathlib.Path(folder.name) / "peers.svg"
        code, lines, last = self.last(200, "peers.py", "--quick", "--sizes", "65536,4194304", "--methods", "module,loans,turns", "--svg", picture)
        self.assertEqual((code, last), (0, "11 passed, 0 failed"), "\n".join(lines))
        drawn = xml.etree.ElementTree.parse(picture).getroot()
        self.assertEqual(len(drawn.findall("{http://www.w3.org/2000/svg}polyline")), 3)


class Pages(unittest.TestCase):
    def test_programs_are_python(self):
        for page in ("docs/python.md", "docs/migrating.md", "README.md"):
            blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
            self.assertTrue(blocks, page)
            for block in blocks:
                compile(block, page, "exec")

    def test_struct_of_the_metadata(self):
        """The header in docs/python.md is that of worker.c."""
        def fields(path):
            found = re.search(r"struct \w+ \{[^}]*char magic\[4\];[^}]*?uint32_t user_bytes, flags;", path.read_text())
            return re.findall(r"\b(?:char|uint\d+_t) [^;]+;", found.group(0))
        self.assertEqual(fields(ROOT / "docs/python.md"), fields(EXAMPLES / "worker.c"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
