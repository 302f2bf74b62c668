#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""gpuloan lend and borrow as two processes: identical files over a socket and over an inherited FD, the key in every
way it can travel, either side first, and nothing left behind."""
import hashlib
import os
import socket
import unittest

from cli import CliTest, STEPS


class LendBorrowTest(CliTest):
    def setUp(self):
        super().setUp()
        self.socket = self.folder / "s"
        self.to = self.folder / "to"

    def compare(self, source, lend, borrow):
        lent, borrowed = self.finish(lend), self.finish(borrow)
        self.expect_ok(lent)
        self.expect_ok(borrowed)
        self.assertEqual(source.read_bytes(), self.to.read_bytes())
        left = {path.name for path in self.folder.iterdir()} - {source.name, self.to.name}
        self.assertEqual(left, set(), "files were left behind")
        return lent, borrowed

    def test_sizes(self):
        for size in (0, 1, 65537, 1 << 20, 9_000_001):
            with self.subTest(size=size):
                source = self.make_file("from", size)
                lend = self.start("lend", "--json", "--socket", self.socket, "--from", source)
                borrow = self.start("borrow", "--json", "--socket", self.socket, "--to", self.to)
                lent, borrowed = self.compare(source, lend, borrow)
                digest = hashlib.sha256(source.read_bytes()).hexdigest()
                self.assertEqual([lent.json["sha256"], borrowed.json["sha256"]], [digest, digest])
                self.check_loan(lent.json["loan"])
                self.check_loan(borrowed.json["loan"], STEPS[2:7])  # an importer does not see RELEASE
                self.assertEqual(lent.json["loan"]["id"], borrowed.json["loan"]["id"])

    def test_borrower_first(self):
        source = self.make_file("from", 100_000)
        borrow = self.start("borrow", "--socket", self.socket, "--to", self.to)
        self.wait_for(lambda: list(self.folder.glob("to.*")), "the borrower's temporary file")
        self.compare(source, self.start("lend", "--socket", self.socket, "--from", source), borrow)

    def test_text_output(self):
        source = self.make_file("from", 100_000)
        lent, borrowed = self.compare(source, self.start("lend", "--socket", self.socket, "--from", source),
                                      self.start("borrow", "--socket", self.socket, "--to", self.to))
        for result in (lent, borrowed):
            self.assertIn("driver  SIMULATED driver", result.out)
            self.assertIn("UNIMPORT us", result.out)
            self.assertIn(hashlib.sha256(source.read_bytes()).hexdigest(), result.out)

    def test_a_rung_that_cannot_carry_it_is_refused_before_anybody_is_waited_for(self):
        source = self.make_file("from", 10)
        for rung in ("ipc", "pool"):
            for command in (("lend", "--timeout", "1", "--socket", self.socket, "--from", source), ("demo", source)):
                result = self.expect(self.run_cli(*command, "--rung", rung), "unsupported", f"'--rung': {rung} cannot carry", "arena")
                self.assertEqual(result.out, "")
        self.assertFalse(self.socket.exists())

    # E10
    def test_key_file_is_private(self):
        source = self.make_file("from", 10)
        key = self.folder / "key"
        lend = self.start("lend", "--socket", self.socket, "--from", source, "--key-file", key)
        self.wait_for(key.exists, "the key file")
        self.assertEqual(key.stat().st_mode & 0o7777, 0o600)
        self.assertRegex(key.read_text(), r"\A[0-9a-f]{64}\n\Z")
        self.compare(source, lend, self.start("borrow", "--socket", self.socket, "--to", self.to, "--key-file", key))

    def lend_with_key_pipe(self, source):
        read_end, write_end = os.pipe()
        lend = self.start("lend", "--socket", self.socket, "--from", source, "--key-fd", write_end,
                          pass_fds=(write_end,))
        os.close(write_end)
        return lend, read_end

    def test_key_by_fd(self):
        source = self.make_file("from", 10)
        lend, read_end = self.lend_with_key_pipe(source)
        borrow = self.start("borrow", "--socket", self.socket, "--to", self.to, "--key-fd", read_end,
                            pass_fds=(read_end,))
        os.close(read_end)
        self.compare(source, lend, borrow)

    def test_key_by_environment(self):
        source = self.make_file("from", 10)
        lend, read_end = self.lend_with_key_pipe(source)
        key = os.read(read_end, 100).decode().strip()
        os.close(read_end)
        borrow = self.start("borrow", "--socket", self.socket, "--to", self.to, env={"GPULOAN_KEY": key})
        self.compare(source, lend, borrow)

    # E8
    def test_inherited_fd(self):
        source = self.make_file("from", 300_001)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            lend = self.start("lend", "--fd", left.fileno(), "--from", source, pass_fds=(left.fileno(),))
            borrow = self.start("borrow", "--fd", right.fileno(), "--to", self.to, pass_fds=(right.fileno(),))
        self.compare(source, lend, borrow)

    def test_borrower_without_a_device(self):
        source = self.make_file("from", 300_001)
        lent, borrowed = self.compare(source, self.start("lend", "--json", "--socket", self.socket, "--from", source),
                                      self.start("borrow", "--json", "--cpu", "--socket", self.socket, "--to", self.to))
        self.assertEqual(borrowed.json["loan"]["memory"], "host")
        self.assertIsNone(borrowed.json["driver"])

    def test_host_rung_and_gates(self):
        source = self.make_file("from", 300_001)
        for rung, gate in (("host", "memop"), ("vmm", "event"), ("host", "host")):
            with self.subTest(rung=rung, gate=gate):
                lend = self.start("lend", "--json", "--socket", self.socket, "--from", source, "--rung", rung,
                                  "--gate", gate)
                lent, _ = self.compare(source, lend, self.start("borrow", "--socket", self.socket, "--to", self.to))
                self.assertEqual((lent.json["loan"]["rung"], lent.json["loan"]["gate"]), (rung, gate))

    def test_borrower_without_vmm_gets_a_copy_with_the_reason(self):
        source = self.make_file("from", 300_001)
        lend = self.start("lend", "--json", "--socket", self.socket, "--from", source)
        borrow = self.start("borrow", "--socket", self.socket, "--to", self.to, env={"GPULOAN_SIM_WITHOUT": "vmm"})
        loan = self.compare(source, lend, borrow)[0].json["loan"]
        self.assertEqual((loan["rung"], loan["copied_bytes"]), ("host", 300_001))
        self.assertIn("vmm", loan["rung_reason"])

    def test_pipes(self):
        data = b"through two pipes" * 9999
        path = self.folder / "input"
        path.write_bytes(data)
        with path.open("rb") as stdin, self.to.open("wb") as stdout:
            lend = self.start("lend", "--socket", self.socket, "--from", "-", stdin=stdin)
            borrow = self.start("borrow", "--socket", self.socket, "--to", "-", stdout=stdout)
        self.expect_ok(self.finish(lend))
        borrowed = self.expect_ok(self.finish(borrow))
        self.assertEqual(self.to.read_bytes(), data)
        self.assertIn("UNIMPORT us", borrowed.err)

    # G5
    def test_borrower_on_a_device_that_the_lender_does_not_see(self):
        source = self.make_file("from", 300_001)
        four = {"GPULOAN_SIM_DEVICES": "4"}
        lend = self.start("lend", "--json", "--socket", self.socket, "--from", source, env={**four, "CUDA_VISIBLE_DEVICES": "0"})
        borrow = self.start("borrow", "--json", "--socket", self.socket, "--to", self.to, env={**four, "CUDA_VISIBLE_DEVICES": "1"})
        lent, borrowed = self.compare(source, lend, borrow)
        self.assertEqual((lent.json["loan"]["rung"], lent.json["loan"]["memory"]), ("host", "device"))
        self.assertIn("vmm: the importer works on another device, and this one is not visible to it: " + lent.json["device"]["uuid"], lent.json["loan"]["rung_reason"])
        self.assertNotEqual(borrowed.json["device"]["uuid"], lent.json["device"]["uuid"])

    def test_an_existing_file_keeps_its_mode(self):
        self.to.write_text("old")
        self.to.chmod(0o600)
        source = self.make_file("from", 10)
        self.compare(source, self.start("lend", "--socket", self.socket, "--from", source),
                     self.start("borrow", "--socket", self.socket, "--to", self.to))
        self.assertEqual(self.to.stat().st_mode & 0o7777, 0o600)

    def test_a_symbolic_link_is_replaced(self):
        source = self.make_file("from", 10)
        inode = source.stat().st_ino
        self.to.symlink_to(source)
        self.compare(source, self.start("lend", "--socket", self.socket, "--from", source),
                     self.start("borrow", "--socket", self.socket, "--to", self.to))
        self.assertFalse(self.to.is_symlink())
        self.assertEqual(source.stat().st_ino, inode)

    def test_a_new_file_gets_usual_rights(self):
        source = self.make_file("from", 10)
        self.compare(source, self.start("lend", "--socket", self.socket, "--from", source),
                     self.start("borrow", "--socket", self.socket, "--to", self.to))
        mask = os.umask(0)
        os.umask(mask)
        self.assertEqual(self.to.stat().st_mode & 0o777, 0o666 & ~mask)

    # B12
    def test_stale_socket_and_key_of_a_killed_lender_do_not_matter(self):
        source = self.make_file("from", 10)
        key = self.folder / "s.key"
        first = self.start("lend", "--socket", self.socket, "--from", source)
        self.wait_for(key.exists, "the key file")
        first.kill()
        self.finish(first)
        self.assertTrue(self.socket.exists())
        borrow = self.start("borrow", "--socket", self.socket, "--to", self.to)
        self.compare(source, self.start("lend", "--socket", self.socket, "--from", source), borrow)


if __name__ == "__main__":
    unittest.main()
