#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the first inputs of every fuzz target: python3 make_corpus.py corpus

Each is the shortest one that gets a target somewhere on purpose; files named by a fuzzer (bare hexadecimal names) are not
touched. What an input means is said at the top of each fuzz_*.cpp.
"""
import pathlib
import struct
import sys

RIGHTS, CREDENTIALS, PIDFD = 1, 2, 4
HELLO, CHUNK, EXPORT, ACK = 1, 9, 14, 17


def item(kind, data, level=1):
    body = struct.pack("<Qii", 16 + len(data), level, kind) + data
    return body + b"\0" * (-len(body) % 8)


def fds(count):
    return item(RIGHTS, struct.pack("<%di" % count, *range(3, 3 + count)))


def record(kind, fd_count=0, tail=b"", magic=0x4E4F4C47, version=1):
    return struct.pack("<IHHHHI", magic, version, kind, fd_count, len(tail), 0) + b"\0" * 112 + tail


def message(control, data, flags=0):
    return struct.pack("<BH", flags, len(control)) + control + data


who = item(CREDENTIALS, struct.pack("<iII", 7, 1000, 1000))
control = {
    "rights": fds(2),
    "all": who + item(PIDFD, struct.pack("<i", 5)) + fds(64),
    "two-pidfds": item(PIDFD, struct.pack("<ii", 5, 6)),
    "no-pidfd": item(PIDFD, struct.pack("<i", -3)),
    "short-credentials": item(CREDENTIALS, b"1234"),
    "other-level": item(RIGHTS, struct.pack("<i", 9), level=41) + fds(1),
    "too-long": struct.pack("<Qii", 1 << 40, 1, RIGHTS) + b"\0" * 16,
    "too-short": struct.pack("<Qii", 15, 1, RIGHTS) + b"\0" * 16,
    "no-padding": fds(1)[:20],
}
decode = {
    "hello": message(who, record(HELLO, tail=b"\1" * 24)),
    "chunk": message(fds(1), record(CHUNK, 1)),
    "chunk-two": message(fds(2), record(CHUNK, 1)),
    "chunk-pidfd": message(item(PIDFD, struct.pack("<i", 5)) + fds(1), record(CHUNK, 1)),
    "too-many": message(fds(65), record(CHUNK, 1)),
    "lost": message(fds(1), record(CHUNK, 1), flags=2),
    "cut": message(b"", record(ACK), flags=1),
    "ack": message(b"", record(ACK, tail=b"why")),
    "export": message(b"", record(EXPORT, tail=b"x" * 9)),
    "magic": message(fds(1), record(CHUNK, 1, magic=1)),
    "version": message(b"", record(ACK, version=2)),
    "type": message(b"", record(29)),
    "several": message(b"", record(EXPORT, tail=b"x" * 16) + record(ACK) + record(ACK)),
    "several-padded": message(b"", record(EXPORT, tail=b"x" * 9) + b"\0" * 7 + record(ACK, tail=b"why")),
    "several-cut": message(b"", record(ACK) + record(ACK)[:-1]),
    "several-chunk": message(fds(1), record(CHUNK, 1) + record(ACK)),
    "short": message(fds(1), record(CHUNK, 1)[:127]),
}
body = struct.pack("<HHIII", 1, 1, 0, 0, 0).ljust(112, b"\0")
handshake = {
    "hello": struct.pack("<BBI", 0, 0, 0) + body,
    "hello-devices": struct.pack("<BBI", 0, 0, 0) + body + b"\2" * 48,
    "user": struct.pack("<BBI", 4, 0, 1001) + body,
    "boot": struct.pack("<BBI", 8, 0, 0) + body,
    "welcome": struct.pack("<BBI", 64, 0, 0) + struct.pack("<HHIII", 1, 0, 0, 0, 8).ljust(112, b"\0"),
    "refused": struct.pack("<BBI", 65, 3, 0) + struct.pack("<i", -33).ljust(112, b"\0") + b"no\n\x1b[31m",
}
state = {
    "turns": bytes([0, 2, 1, 2, 4]),
    "retired": bytes([0, 5, 8, 9]),
    "quarantined": bytes([0, 3, 7, 9]),
    "import": bytes([0, 3, 4, 5, 2, 3, 6, 5]),
    "import-cancel": bytes([0, 3, 4, 7, 5]),
}
ledger = {
    "readers-and-writer": bytes([1, 0, 0, 0, 16, 0, 0, 8, 16, 0, 1, 15, 1, 4, 0, 1, 15, 1]),
    "long-reader": bytes([1, 0, 0x82, 0, 9, 0, 0, 1, 1, 0, 1, 200, 2, 6, 0, 0, 255]),
    "end-of-memory": bytes([2, 0, 1, 200, 255, 0, 0, 255, 1, 7, 0, 0, 255, 4, 4]),
}
keyring = {
    "life": bytes([0, 3]) + b"abc" + bytes([2, 0, 4, 0, 2, 0, 5, 0, 2, 0]),
    "wrong": bytes([0, 0, 6, 0, 17, 7, 32]) + b"z" * 32,
    "long-name": bytes([0, 64]) + b"n" * 64,
}
key = b"0123456789abcdefABCDEF" + b"0" * 42
keys = {
    "good": key,
    "spaces": b" \t" + key + b"\r\n",
    "short": key[:63],
    "sign": b"+" + key[:63],
    "zero-byte": key + b"\0" + b"more",
    "second-line": key + b"\nmore",
    "second-line-first": b"\n" + key,
}
numbers = {name.strip() or "empty": bytes([0x70]) + name.encode() for name in [
    "", "0", "17B", "64KiB", "16777216TiB", "16777215TiB", "18446744073709551615", "18446744073709551616", "1.5MiB", "0.25",
    "1000000", "1000000.5", ".5", "5.", "1e3", "inf", "-1", "+1", "vmm", "0x10"]}
options = {
    "words": b"--flag\n--value=a b\n--count\n7\nfile",
    "ended": b"--\n--flag\n-",
    "help": b"x\n--help\n--bad",
    "near": b"--flg",
    "hidden": b"--secre=1",
    "missing": b"--value",
    "flag-value": b"--flag=1",
    "bad-count": b"--count=12",
    "short": b"-v",
}

# Operations of the two contexts, by their number in operate().
shake = bytes([3, 3, 3])
region = bytes([16, 4, 1])
lend = bytes([10, 0x0B, 0, 100])  # write, more turns, of the region
exporter = {
    "ready": shake,
    "loan": shake + region + lend + bytes([6, 0, 5, 5, 0, 2]),
    "turns": shake + region + lend + bytes([6, 0, 5, 12, 0, 6, 0, 6, 14, 0, 5, 0, 4]),
    "cancelled": shake + region + lend + bytes([13, 0, 5, 0, 1, 0xF2, 0]),
    "lost": shake + region + lend + bytes([9, 0]),
    "done-and-lost": shake + region + lend + bytes([6, 0, 5, 9, 0, 17, 0]),
    "returned": shake + bytes([10, 0]) + bytes([5, 0, 0]),
    "requests": shake + bytes([8, 1, 0, 100, 0, 1, 0, 15, 0, 8, 2, 0, 9, 0, 0, 0, 15, 1]),
    "ack-twice": shake + region + lend + bytes([5, 0, 2, 5, 0, 2]),
    "generation": shake + region + lend + bytes([5, 0, 0x12]),
    "no-hello": bytes([1, 16, 0, 0]),
    "scribble": shake + region + lend + bytes([7, 1]) + b"\xff" * 8,
    "rubbish": shake + bytes([0, 8, 0, 5]) + b"hello",
}
chunk = bytes([3, 0x8C, 1])  # host pages for write, number 1
offer = bytes([7, 0x43, 0x18, 1, 1, 100])
ready = bytes([11, 1, 1, 0, 0, 0])
ask = bytes([15, 10, 1])
importer = {
    "loan": bytes([0]) + chunk + offer + ready + bytes([16, 0, 18, 0, 23]),
    "offered": bytes([0]) + chunk + offer,
    "held-and-lost": bytes([0]) + chunk + offer + ready + bytes([16, 0, 14, 0, 23]),
    "cancelled": bytes([0]) + chunk + offer + bytes([13, 6, 23]),
    "request": bytes([0]) + chunk + ask + bytes([7, 0x59, 0x18, 2, 1, 1]) + bytes([16, 0, 18, 0]),
    "denied": bytes([0]) + ask + bytes([13, 5, 0xEF]),
    "let-go": bytes([0]) + chunk + ask + bytes([19, 0, 0]) + bytes([7, 0x59, 0x18, 2, 1, 1]),
    "loan-0": bytes([0]) + chunk + bytes([7, 0x43, 0x18, 0, 1, 100]) + ask + bytes([13, 5, 0xFF]),
    "request-canary": bytes([0]) + chunk + ask + bytes([7, 0xD9, 0x18, 2, 1, 1]),
    "request-read": bytes([0]) + chunk + ask + bytes([7, 0x59, 0x40, 2, 1, 1, 0, 0]) + bytes([11, 2, 1, 0, 0, 0, 16, 0]),
    "canary": bytes([0]) + chunk + bytes([7, 0xC3, 0x18, 1, 1, 100, 23, 23]),
    "foreign-recalled": bytes([0]) + bytes([4, 0x59, 2, 0, 0, 1, 6, 10]),
    "foreign": bytes([0]) + bytes([4, 0x59, 2, 0, 0, 1]) + bytes([7, 0x43, 0x18, 1, 2, 100]) + ready + bytes([16, 0, 23]),
    "foreign-shared": bytes([0]) + bytes([4, 0x59, 2, 0, 0, 1, 4, 0x59, 3, 0, 0, 1]) + bytes([7, 0x43, 0x18, 1, 2, 100, 19, 0, 0, 23]),
    "pieces": bytes([0]) + bytes([4, 0x5A, 3, 2, 0, 1, 5, 3, 0, 5, 3, 1, 7, 0x43, 0x18, 1, 3, 100]) + ready + bytes([16, 0]),
    "pool": bytes([0]) + bytes([6, 5, 4, 0x5B, 2, 0, 1, 1]) + bytes([7, 0x43, 0x18, 1, 2, 100]),
    "recall": bytes([0]) + chunk + offer + bytes([6, 6, 19, 0, 0]),
    "ring": bytes([0]) + bytes([6, 3]),
    "unsealed": bytes([0]) + bytes([3, 0x8D, 1, 0]) + offer + ready + bytes([16, 0]),
    "welcome-refused": bytes([1, 1, 3, 4]) + struct.pack("<i", -25) + bytes([0]),
    "small-pages": bytes([3]),
    "missing-seal": bytes([6, 1]),
}


def main():
    root = pathlib.Path(sys.argv[1])
    for target in ["control", "decode", "exporter", "handshake", "importer", "keyring", "keys", "ledger", "numbers", "options",
                   "state"]:
        folder = root / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in globals()[target].items():
            (folder / ("seed-" + name)).write_bytes(data)


main()
