#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Chooses from a fuzzer's finds the few that cover together what all do: thin.py PROGRAM FINDS CORPUS

CORPUS keeps its files; as many finds are added as it has room for, those that cover most first. Finds over 600 bytes are left
out: a file of a corpus should be small enough to be read.
"""
import hashlib
import pathlib
import subprocess
import sys
import tempfile

ROOM, BYTES = 40, 600


def features_of(program, files):
    """File name to the set of its features, as libFuzzer's merge notes them in its control file."""
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "in").mkdir()
        (work / "out").mkdir()
        for number, file in enumerate(files):
            (work / "in" / ("%06d" % number)).write_bytes(file.read_bytes())
        control = work / "control"
        subprocess.run([program, "-set_cover_merge=1", "-merge_control_file=%s" % control, work / "out", work / "in"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = control.read_text().splitlines()
    names = [pathlib.Path(line).name for line in lines[2:2 + int(lines[0])]]
    features = {}
    for line in lines:
        word, *numbers = line.split(" ")
        if word == "FT":
            features[files[int(names[int(numbers[0])])]] = set(numbers[1:])
    return features


def main():
    program, finds, corpus = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    kept = sorted(corpus.iterdir())
    candidates = [file for file in sorted(finds.iterdir()) if file.is_file() and file.stat().st_size <= BYTES]
    features = features_of(program, kept + candidates)
    covered = set().union(*(features.get(file, set()) for file in kept))
    for _ in range(ROOM - len(kept)):
        best = max(candidates, key=lambda file: (len(features.get(file, set()) - covered), -file.stat().st_size), default=None)
        if best is None or not features.get(best, set()) - covered:
            break
        data = best.read_bytes()
        (corpus / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)
        covered |= features[best]
        candidates.remove(best)


main()
