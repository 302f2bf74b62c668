#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A version script for the simulated driver as of an older CUDA version: what came later is not exported. Arguments: the version as
1000 * major + 10 * minor, then the symbol tables."""
import re
import sys

version = int(sys.argv[1])
later = [] if version >= 12000 else ["cuGetProcAddress_v2"]
for path in sys.argv[2:]:
    with open(path, encoding="utf-8") as table:
        for since, exported in re.findall(r"^GPULOAN_CUDA\(\w+, (\d+), \w+, \w+, (\w+),", table.read(), re.MULTILINE):
            if int(since) > version:
                later.append(exported)
print("{ global: cu*; gpuloan_sim_*; local:")
print("".join(f"  {name};\n" for name in later) + "  *; };")
