#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The C program in README.md is docs/examples/first.c, which other tests compile and run; every path it links to exists.
Argument: the source tree."""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
readme = (root / "README.md").read_text()
bad = []

blocks = re.findall(r"^```c\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
example = (root / "docs/examples/first.c").read_text().split("\n", 1)[1]  # without the licence line
if blocks != [example]:
    bad.append("the C program in README.md is not docs/examples/first.c")
for target in re.findall(r"\]\(([^)#:]+)\)", readme):
    if not (root / target).exists():
        bad.append(f"README.md links to {target}, which does not exist")

print("\n".join(bad) or "README.md fits the tree")
sys.exit(1 if bad else 0)
