#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two processes that load different builds of the library: this one, and ones that speak other versions of the protocol. They
hand over a file at the highest version that both speak, or refuse each other, and both say which versions those are."""
import itertools
import os
import socket
import unittest

from cli import CliTest

OTHER = dict(pair.split("=") for pair in os.environ["GPULOAN_TEST_VERSIONS"].split(","))  # "1-2": its library
BUILDS = {"1-1": None, **OTHER}


def numbers(build):
    low, high = map(int, build.split("-"))
    return set(range(low, high + 1))


def in_words(build):
    return build.replace("-", " to ")


class VersionsTest(CliTest):
    def pair(self, lender, borrower):
        to, source = self.folder / "to", self.make_file("from", 100_000)
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def start(build, end, *words):
            with end:
                env = {"LD_PRELOAD": BUILDS[build]} if BUILDS[build] else {}
                return self.start(*words, "--fd", end.fileno(), env=env, pass_fds=(end.fileno(),))

        lend = start(lender, ends[0], "lend", "--from", source)
        borrow = start(borrower, ends[1], "borrow", "--to", to)
        return self.finish(lend), self.finish(borrow), to.exists() and to.read_bytes() == source.read_bytes()

    def test_each_with_each(self):
        for lender, borrower in itertools.product(BUILDS, BUILDS):
            with self.subTest(lender=lender, borrower=borrower):
                lent, borrowed, arrived = self.pair(lender, borrower)
                if numbers(lender) & numbers(borrower):
                    self.expect_ok(lent)
                    self.expect_ok(borrowed)
                    self.assertTrue(arrived, "the bytes did not arrive")
                    (self.folder / "to").unlink()
                    continue
                text = f"the peer speaks protocol versions {in_words(borrower)}, this library {in_words(lender)}"
                for result in (lent, borrowed):
                    self.expect(result, "peer-refused", text)
                self.assertFalse(arrived)

    def test_the_builds_differ(self):
        self.assertEqual(sorted(BUILDS), ["1-1", "1-2", "2-3"])


if __name__ == "__main__":
    unittest.main()
