# SPDX-License-Identifier: MIT
"""gpuloan.py as mypy sees it, and all Python here as ruff or flake8 does. Skipped, and said so, where a tool is missing."""
import importlib.util
import os
import shutil
import subprocess
import sys
import unittest

from support import HERE, MODULE, main


class Mypy(unittest.TestCase):
    def test_mypy(self):
        if importlib.util.find_spec("mypy") is None and shutil.which("mypy") is None:
            self.skipTest("mypy is not installed (Debian: mypy)")
        command = [shutil.which("mypy")] if shutil.which("mypy") else [sys.executable, "-m", "mypy"]
        command += ["--strict", "--python-version", "3.9", "--cache-dir", os.devnull, str(MODULE)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=250)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


class Flake8(unittest.TestCase):
    def test_flake8(self):
        command = shutil.which("ruff") or shutil.which("flake8")
        if command is None:
            self.skipTest("neither ruff nor flake8 is installed (Debian: flake8)")
        options = ["check", "--line-length", "140"] if command.endswith("ruff") else ["--max-line-length", "140"]
        files = [str(path) for path in sorted(HERE.glob("*.py"))]
        result = subprocess.run([command, *options, "--extend-ignore", "E402", str(MODULE), *files], capture_output=True, text=True,
                                timeout=250)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    main()
