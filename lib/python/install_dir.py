# SPDX-License-Identifier: MIT
"""Prints the folder below a prefix that this Python looks for modules in, and an empty line where there is none: Debian's looks in
/usr/local/lib/python3.11/dist-packages and /usr/lib/python3/dist-packages, and no rule gives both. Argument: the prefix."""
import os
import re
import site
import sys

prefix = os.path.join(sys.argv[1], "")
below = [path[len(prefix):] for path in site.getsitepackages() if path.startswith(prefix)]
print(next((path for path in below if re.fullmatch(r"lib(64)?/python[^/]*/(site|dist)-packages", path)), ""))
