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
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder, "unit" + suffix)
        # Twice, for the guard; the function keeps the unit from being empty.
        unit.write_text(f"#include <{header}>\n" * 2 + "int unit(void);\nint unit(void) {\n"
                        "  gpuloan_view view = GPULOAN_INIT(gpuloan_view);\n"
                        "  return view.size == sizeof view && view.host == NULL ? 0 : 1;\n}\n")
        command = [*compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror",
                   f"-I{include}", "-c", str(unit), "-o", str(unit) + ".o"]
        result = subprocess.run(command, capture_output=True, text=True)
    return result


def compile_well(compiler, standard, header, suffix):
    global failed, checked
    result = compile_alone(compiler, standard, header, suffix)
    checked += 1
    if result.returncode != 0:
        failed += 1
        print(f"{header} as {standard}:\n{result.stderr}")


for standard in ("c11", "c17"):
    compile_well(cc, standard, "gpuloan/gpuloan.h", ".c")
for standard in ("c++11", "c++14", "c++17", "c++20", "c++23"):
    compile_well(cxx, standard, "gpuloan/gpuloan.h", ".cpp")
    if standard >= "c++17":
        compile_well(cxx, standard, "gpuloan/gpuloan.hpp", ".cpp")
    elif "needs C++17" not in compile_alone(cxx, standard, "gpuloan/gpuloan.hpp", ".cpp").stderr.split("\n")[1]:
        failed += 1
        print(f"gpuloan.hpp as {standard}: the first error does not say that it needs C++17")

foreign = re.compile(r"^\s*#\s*include\s*[<\"](cuda|nvml|driver_types|device_launch)[\w/]*\.h[>\"]", re.MULTILINE)
for folder in ("include", "lib", "tools", "test", "docs/examples"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in (".h", ".hpp", ".c", ".cpp", ".inc") and foreign.search(path.read_text()):
            failed += 1
            print(f"{path.relative_to(root)} includes a CUDA header")

print(f"{checked} compilations, {failed} problems")
sys.exit(1 if failed else 0)
