#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""libgpuloan.so exports exactly the functions that gpuloan.h declares, all in a version node, and needs no library beyond
libc, libstdc++, libgcc, libm and liburing. Arguments: the library, the header."""
import pathlib
import re
import subprocess
import sys

library, header = sys.argv[1], pathlib.Path(sys.argv[2]).read_text()
bad = []


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


declared = set(re.findall(r"^GPULOAN_API\s[^;(]*?\b(gpuloan_\w+)\(", header, re.MULTILINE))
exported, nodes = set(), set()
for line in output_of("nm", "-D", "--defined-only", library).splitlines():
    kind, symbol = line.split()[-2:]
    name, _, node = symbol.partition("@@")
    if kind == "A":
        continue  # the version node itself
    exported.add(name)
    nodes.add(node)
bad += [f"exported but not declared: {name}" for name in sorted(exported - declared)]
bad += [f"declared but not exported: {name}" for name in sorted(declared - exported)]
bad += [f"not in a version node: {node!r}" for node in nodes if not node.startswith("GPULOAN_")]
if len(declared) < 20:
    bad.append(f"only {len(declared)} declarations were found: the pattern does not fit the header")

# J6, J7
allowed = {"libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "liburing.so.2", "ld-linux-x86-64.so.2",
           "ld-linux-aarch64.so.1", "libdl.so.2", "libpthread.so.0"}  # the last two: glibc before 2.34
dynamic = output_of("readelf", "-d", library)
needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
bad += [f"needs {name}" for name in sorted(needed - allowed)]
soname = re.findall(r"\(SONAME\).*\[(.+)\]", dynamic)
if soname != ["libgpuloan.so.0"]:
    bad.append(f"SONAME is {soname}")
bad += [line.strip() for line in dynamic.splitlines() if "(RPATH)" in line or "(TEXTREL)" in line]

print("\n".join(bad) or f"{len(exported)} functions in {sorted(nodes)}; needs {sorted(needed)}")
sys.exit(1 if bad else 0)
