#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""docs/environment.md lists exactly the variables that lib/ and tools/ read. Argument: the source tree."""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
header = (root / "include/gpuloan/gpuloan.h").read_text()
not_variables = set(re.findall(r"\bGPULOAN_[A-Z0-9_]+\b", header))  # names of constants also occur as texts

read_by_code = {}
for folder in ("lib", "tools"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix not in (".cpp", ".hpp", ".c", ".h", ".inc", ".py"):
            continue
        text = path.read_text()
        names = set(re.findall(r"getenv\(\s*\"([A-Za-z_0-9]+)\"", text))
        names |= set(re.findall(r"environ(?:\.get\(|\[)\s*[\"']([A-Za-z_0-9]+)[\"']", text))
        names |= {name for name in re.findall(r"\"(GPULOAN_[A-Z0-9_]+)\"", text) if name not in not_variables}
        for name in names:
            read_by_code.setdefault(name, path.relative_to(root))

page = (root / "docs/environment.md").read_text()
documented = set(re.findall(r"^\| `([A-Z_0-9]+)` \|", page, re.MULTILINE))

# The simulated driver's profiles: as many in the list as in the code, and a test for each.
profiles = set(re.findall(r'^    \{"([a-z0-9.-]+)",', (root / "lib/sim/profile.cpp").read_text(), re.MULTILINE))
described = set()
for row in re.findall(r"^\| (`[a-z][^|]*`) \|", page, re.MULTILINE):
    described |= set(re.findall(r"`([a-z0-9.-]+)`", row))
tested = set(re.findall(r'^    \{"([a-z0-9.-]+)",', (root / "test/contract/profile_main.cpp").read_text(), re.MULTILINE))
if not profiles or profiles != described or profiles != tested:
    print(f"profiles in code {sorted(profiles)}, in docs/environment.md {sorted(described)}, in profile_main.cpp {sorted(tested)}")
    sys.exit(1)

for name in sorted(set(read_by_code) - documented):
    print(f"{read_by_code[name]} reads {name}, which docs/environment.md does not list")
for name in sorted(documented - set(read_by_code)):
    print(f"docs/environment.md lists {name}, which no code in lib/ or tools/ reads")
if not read_by_code or set(read_by_code) != documented:
    sys.exit(1)
print(f"{len(documented)} variables, all documented and all read")
