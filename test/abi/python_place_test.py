#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan.py is installed where Python looks for it: a module is put where lib/python/install_dir.py says and imported, in a virtual
environment of each Python here, and below /usr and /usr/local the folder is one that Python searches. Argument: the source tree."""
import pathlib
import subprocess
import sys
import tempfile

script = pathlib.Path(sys.argv[1]) / "lib/python/install_dir.py"


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, cwd="/")
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


for python in [path for path in (sys.executable, "/usr/bin/python3") if pathlib.Path(path).exists()]:
    with tempfile.TemporaryDirectory(prefix="gpuloan-python-place-") as name:
        prefix = pathlib.Path(name).resolve() / "env"
        run(python, "-m", "venv", "--without-pip", prefix)
        inside = prefix / "bin/python3"
        place = prefix / run(inside, "-I", script, prefix)
        place.mkdir(parents=True, exist_ok=True)
        (place / "gpuloan_was_here.py").write_text("")
        found = run(inside, "-c", "import gpuloan_was_here; print(gpuloan_was_here.__file__)")
        if place == prefix or found != str(place / "gpuloan_was_here.py"):
            sys.exit(f"{python}: put into {place}, found as {found}")
        if run(python, "-I", script, prefix) != "":
            sys.exit(f"{python}: says that it looks below {prefix}, which is not its own")
    searched = run(python, "-I", "-c", "import sys; print(*sys.path, sep='\\n')").split("\n")
    for prefix in ("/usr", "/usr/local"):
        place = run(python, "-I", script, prefix)
        mine = [path for path in searched if path.startswith(f"{prefix}/lib") and path.endswith("-packages")]
        if mine and f"{prefix}/{place}" not in searched:
            sys.exit(f"{python} looks in {mine}, and not in {prefix}/{place}")
        print(f"{python}, {prefix}: {place or '(looks nowhere below it)'}")
