#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Installs the build into an empty folder, then compiles docs/examples/first.c and first.cpp against the installed files
with pkg-config alone and runs them: each completes a loan on the installed simulated driver. Arguments: the source tree,
the build tree, the C compiler, the C++ compiler."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

source, build = pathlib.Path(sys.argv[1]), sys.argv[2]
compilers = {".c": shlex.split(sys.argv[3]) + ["-std=c11"], ".cpp": shlex.split(sys.argv[4]) + ["-std=c++17"]}


def run(command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def only(root, pattern):
    found = sorted(root.rglob(pattern))
    if not found:
        sys.exit(f"{pattern} was not installed")
    return found[0]


if shutil.which("pkg-config") is None or shutil.which("meson") is None:
    print("no pkg-config or no meson to run")
    sys.exit(77)

with tempfile.TemporaryDirectory(prefix="gpuloan-installed-") as name:
    folder = pathlib.Path(name)
    root = folder / "root"
    run(["meson", "install", "-C", build, "--no-rebuild", "--destdir", str(root), "--quiet"])
    pc, library, sim = only(root, "gpuloan.pc"), only(root, "libgpuloan.so.0"), only(root, "libgpuloan-sim.so")
    for pattern in ("gpuloan.h", "gpuloan.hpp", "libgpuloan.so", "bin/gpuloan"):
        only(root, pattern)

    documents = only(root, "doc/gpuloan")
    for path in source.glob("docs/**/*"):
        if path.suffix in (".md", ".svg", ".c", ".cpp", ".py") and not (documents / path.relative_to(source / "docs")).exists():
            sys.exit(f"{path} was not installed")
    for page in root.rglob("man7/gpuloan.7"):  # where there is scdoc
        place = "/" + str(documents.relative_to(root))
        if place not in page.read_text().replace("\\&", "").replace("\\", ""):
            sys.exit(f"gpuloan(7) does not say that the documents are in {place}")

    env = {key: value for key, value in os.environ.items() if not key.startswith("GPULOAN_")}
    env.update(PKG_CONFIG_LIBDIR=str(pc.parent), PKG_CONFIG_SYSROOT_DIR=str(root))
    flags = shlex.split(run(["pkg-config", "--cflags", "--libs", "gpuloan"], env=env))
    env.update(LD_LIBRARY_PATH=str(library.parent), GPULOAN_DRIVER="sim", GPULOAN_SIM_STATE=str(folder / "state"))
    for suffix, compiler in compilers.items():
        program = folder / ("first" + suffix.replace(".", "_"))
        example = only(root, "doc/gpuloan/examples/first" + suffix)
        run([*compiler, "-Wall", "-Wextra", "-Werror", str(example), "-o", str(program), *flags])
        output = run([str(program)], env=env)
        if not re.search(r"^process (\d+) reads: written in place by process (?!\1\b)\d+$", output, re.MULTILINE):
            sys.exit(f"{example.name} printed: {output!r}")
        print(f"{example.name}: {output.strip()}")
    options = {one["name"]: one["value"] for one in json.loads(run(["meson", "introspect", build, "--buildoptions"]))}
    if options["python"] != "disabled":
        module = only(root, "gpuloan.py")
        place = run([sys.executable, "-I", str(source / "lib/python/install_dir.py"), options["prefix"]]).strip()
        if place and not options["python.purelibdir"] and module.parent != root / options["prefix"].lstrip("/") / place:
            sys.exit(f"gpuloan.py was installed as {module}, and Python looks in {place}")
        code = "import gpuloan; print(gpuloan.__file__, gpuloan.version(), gpuloan.driver_info().simulated)"
        output = run([sys.executable, "-W", "error", "-c", code], env=dict(env, PYTHONPATH=str(module.parent), PYTHONDONTWRITEBYTECODE="1"))
        if not re.fullmatch(re.escape(str(module)) + r" \d+\.\d+\.\d+ 1", output.strip()):
            sys.exit(f"the installed gpuloan.py printed: {output!r}")
    worker = folder / "worker"  # docs/examples/worker.c, served by test/examples
    run([*compilers[".c"], "-Wall", "-Wextra", "-Werror", str(only(root, "doc/gpuloan/examples/worker.c")), "-o", str(worker), *flags, "-ldl"])
    alone = subprocess.run([str(worker)], env=env, capture_output=True, text=True, timeout=60)
    if alone.returncode != 2 or "GPULOAN_FD" not in alone.stderr:
        sys.exit(f"worker.c without a parent: {alone}")
    print(run([str(only(root, "bin/gpuloan")), "demo", "--size", "64KiB"], env=env).splitlines()[0])
