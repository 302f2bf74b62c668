#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Each public header compiles alone, without a warning, in every language version it promises; no file of the project
includes a CUDA header. Arguments: the source tree, the C compiler, the C++ compiler (each as one string)."""
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

root, cc, cxx = pathlib.Path(sys.argv[1]), shlex.split(sys.argv[2]), shlex.split(sys.argv[3])
include = root / "include"
failed = 0
checked = 0


def compile_alone(compiler, standard, header, suffix):
    global failed, checked
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder, "unit" + suffix)
        # Twice, for the guard; the function keeps the unit from being empty.
        unit.write_text(f"#include <{header}>\n" * 2 + "int unit(void);\nint unit(void) { return 0; }\n")
        command = [*compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror",
                   f"-I{include}", "-c", str(unit), "-o", str(unit) + ".o"]
        result = subprocess.run(command, capture_output=True, text=True)
    checked += 1
    if result.returncode != 0:
        failed += 1
        print(f"{header} as {standard}:\n{result.stderr}")


for standard in ("c11", "c17"):
    compile_alone(cc, standard, "gpuloan/gpuloan.h", ".c")
for standard in ("c++17", "c++20", "c++23"):
    compile_alone(cxx, standard, "gpuloan/gpuloan.h", ".cpp")
    compile_alone(cxx, standard, "gpuloan/gpuloan.hpp", ".cpp")

foreign = re.compile(r"^\s*#\s*include\s*[<\"](cuda|nvml|driver_types|device_launch)[\w/]*\.h[>\"]", re.MULTILINE)
for folder in ("include", "lib", "tools", "test", "docs/examples"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in (".h", ".hpp", ".c", ".cpp", ".inc") and foreign.search(path.read_text()):
            failed += 1
            print(f"{path.relative_to(root)} includes a CUDA header")

print(f"{checked} compilations, {failed} problems")
sys.exit(1 if failed else 0)
