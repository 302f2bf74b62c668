#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Each way in which lend and borrow can fail has its own exit code and sentence, and comes within the given timeout."""
import os
import resource
import signal
import socket
import subprocess
import time
import unittest

from cli import CliTest, EXE, EXIT

WRONG_KEY = "ab" * 32


class FailureTest(CliTest):
    def setUp(self):
        super().setUp()
        self.socket = self.folder / "s"
        self.key = self.folder / "s.key"
        self.source = self.make_file("from", 1_000_000)
        self.to = self.folder / "to"

    def lend(self, *arguments, **options):
        return self.start("lend", "--socket", self.socket, "--from", self.source, *arguments, **options)

    def borrow(self, *arguments, **options):
        return self.start("borrow", "--socket", self.socket, "--to", self.to, *arguments, **options)

    def over_fd(self, command, end, *arguments):
        return self.run_cli(command, "--fd", end.fileno(), *arguments, pass_fds=(end.fileno(),))

    def listening(self, *arguments, **options):
        lend = self.lend(*arguments, **options)
        self.wait_for(self.key.exists, "the lender's key")
        return lend

    def in_time(self, result, timeout):
        self.assertGreaterEqual(result.seconds, timeout * 0.9)
        self.assertLess(result.seconds, timeout + 10, str(result))

    def no_file_appeared(self):
        self.assertEqual([path.name for path in self.folder.iterdir() if path.name.startswith("to")], [])

    def test_wrong_key(self):
        lend = self.listening("--timeout", "3")
        wrong = self.folder / "wrong"
        wrong.write_text(WRONG_KEY + "\n")
        self.expect(self.finish(self.borrow("--key-file", wrong)), "key-refused", "gpuloan borrow: cannot connect",
                    str(wrong))
        self.expect(self.finish(self.borrow(env={"GPULOAN_KEY": WRONG_KEY})), "key-refused", "GPULOAN_KEY")
        lent = self.expect(self.finish(lend), "key-refused", "refused a connection", "was accepted within 3 s")
        self.in_time(lent, 3)
        self.no_file_appeared()
        self.assertFalse(self.key.exists())
        self.assertFalse(self.socket.exists())

    def test_a_refused_stranger_does_not_end_the_wait(self):
        lend = self.listening()
        self.expect(self.finish(self.borrow(env={"GPULOAN_KEY": WRONG_KEY})), "key-refused")
        self.expect_ok(self.finish(self.borrow()))
        self.expect_ok(self.finish(lend))
        self.assertEqual(self.source.read_bytes(), self.to.read_bytes())

    def test_no_key_and_malformed_key(self):
        lend = self.listening()
        self.expect(self.finish(self.borrow(env={"GPULOAN_KEY": "short"})), "key-refused", "64 hexadecimal digits")
        missing = self.folder / "none"
        result = self.finish(self.borrow("--key-file", missing, "--timeout", "1"))
        self.expect(result, "key-refused", "did not appear within 1 s")
        self.in_time(result, 1)
        self.expect(self.finish(self.borrow("--key-fd", "99")), "key-refused", "FD 99")
        read_end, write_end = os.pipe()
        result = self.finish(self.borrow("--key-fd", read_end, "--timeout", "0.5", pass_fds=(read_end,)))
        os.close(read_end)
        os.close(write_end)
        self.expect(result, "timeout", "no key came")
        lend.send_signal(signal.SIGTERM)
        self.finish(lend)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to run as two users")
    def test_wrong_uid(self):
        os.chmod(self.folder, 0o777)
        os.chmod(self.source, 0o644)
        try:
            if self.run_cli("--version", user=65534).code != 0:
                self.skipTest("another user cannot run the command from this folder")
        except PermissionError as error:
            self.skipTest(f"another user cannot run the command from this folder: {error}")
        lend = self.listening("--timeout", "4", user=65534, env={"GPULOAN_SIM_STATE": str(self.folder / "state")})
        self.expect(self.finish(self.borrow()), "uid-refused", "gpuloan borrow: cannot connect")
        self.expect(self.finish(lend), "uid-refused", "no borrower was accepted")
        lend = self.listening()
        stranger = {"user": 65534, "env": {"GPULOAN_KEY": WRONG_KEY, "GPULOAN_SIM_STATE": str(self.folder / "state")}}
        result = self.finish(self.borrow(**stranger))
        self.expect(result, "uid-refused", "the file is user 0's", "this process runs as user 65534", "EACCES")
        self.assertLess(result.seconds, 30, "it ends at once")
        lend.send_signal(signal.SIGTERM)
        self.finish(lend)
        private = self.folder / "private"
        private.mkdir(mode=0o700)
        result = self.run_cli("borrow", "--socket", private / "s", "--to", self.to, **stranger)
        self.expect(result, "path-unusable", "EACCES")
        self.no_file_appeared()

    def test_missing_and_unreadable_file(self):
        gone = self.folder / "gone"
        result = self.run_cli("lend", "--socket", self.socket, "--from", gone)
        self.expect(result, "file", f"cannot open '{gone}'", "No such file")
        self.assertLess(result.seconds, 10)
        self.expect(self.run_cli("lend", "--socket", self.socket, "--from", self.folder), "file", "Is a directory")
        self.expect(self.run_cli("demo", gone), "file", "No such file")
        for to, text in ((self.folder / "no" / "to", "No such file"), (self.folder, "Is a directory")):
            self.expect(self.run_cli("borrow", "--socket", self.socket, "--to", to), "file", text)

    def test_full_disk(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            process = self.start("probe", stdout=full)
        self.expect(self.finish(process), "file", "standard output")
        with open("/dev/full", "w", encoding="ascii") as full:
            process = self.start("--help", stdout=full)
        self.expect(self.finish(process), "file", "gpuloan: cannot write to standard output: No space left")
        lend = self.listening()
        borrow = self.start("borrow", "--socket", self.socket, "--to", "/dev/full")
        self.expect(self.finish(borrow), "file", "No space left")
        self.assertNotEqual(self.finish(lend).code, 0)

    def closed(self, redirection, *arguments, before=""):
        """Started by a shell with a standard stream closed."""
        words = ["/bin/sh", "-c", f'{before} exec "$0" "$@" {redirection}', EXE, *map(str, arguments)]
        process = subprocess.Popen(words, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True, text=True)
        process.started = time.monotonic()
        self.running.append(process)
        self.groups.append(process.pid)
        return process

    def test_a_system_call_of_the_lender_fails(self):
        lend = self.closed("", "lend", "--socket", self.socket, "--from", self.source, "--timeout", "3", before="trap '' XFSZ;")
        self.wait_for(self.key.exists, "the lender's key")
        resource.prlimit(lend.pid, resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)) # too small for its control words
        self.expect(self.finish(self.borrow()), "system", "refused by the exporter: ftruncate")
        self.expect(self.finish(lend), "system", "ftruncate")

    def test_closed_standard_input_is_no_empty_file(self):
        for command in (("lend", "--socket", self.socket, "--from", "-"), ("demo", "-")):
            self.expect(self.finish(self.closed("<&-", *command)), "file", "cannot read 'standard input': Bad file descriptor")
        self.expect_ok(self.finish(self.closed("<&-", "demo", self.source))) # which does not read it

    def test_closed_standard_output_fails_as_a_full_disk_does(self):
        text = "cannot write to standard output"
        for command in (("--help",), ("--version",), ("probe",), ("probe", "--json"), ("demo",), ("canary", "--rung", "vmm"),
                        ("canary", "--json", "--rung", "vmm"), ("bench", "--quick", "--case", "loans", "--size", "4KiB"), ("lend", "--help")):
            with self.subTest(command):
                self.expect(self.finish(self.closed(">&-", *command)), "file", text)
        lend = self.closed(">&-", "lend", "--socket", self.socket, "--from", self.source)
        borrow = self.closed(">&-", "borrow", "--socket", self.socket, "--to", self.to)
        for process in (lend, borrow):
            self.expect(self.finish(process), "file", text)
        self.assertEqual(self.source.read_bytes(), self.to.read_bytes())
        lend = self.listening()
        self.expect(self.finish(self.closed(">&-", "borrow", "--socket", self.socket, "--to", "-")), "file", "standard output")
        self.assertNotEqual(self.finish(lend).code, 0)

    def test_closed_standard_error_is_not_missed(self):
        self.expect_ok(self.finish(self.closed("2>&-", "demo")))

    def test_busy_path(self):
        first = self.listening()
        key = self.key.read_text()
        self.expect(self.finish(self.lend()), "path-busy", f"cannot listen at '{self.socket}'")
        self.assertEqual(self.key.read_text(), key, "the first lender's key must be left alone")
        self.expect_ok(self.finish(self.borrow()))
        self.expect_ok(self.finish(first))

    def test_a_key_replaces_only_a_key(self):
        for text in ("precious", WRONG_KEY + "0\n", WRONG_KEY + "\0", "x" * 5000):
            self.key.write_text(text)
            self.expect(self.finish(self.lend("--timeout", "1")), "file", f"would replace '{self.key}', which holds no key")
            self.assertEqual(self.key.read_text(), text)
        self.key.unlink()
        self.key.symlink_to(self.source)
        self.expect(self.finish(self.lend("--timeout", "1")), "file", "holds no key")
        self.assertTrue(self.key.is_symlink())
        self.key.unlink()
        result = self.finish(self.lend("--key-file", self.source, "--timeout", "1"))
        self.expect(result, "file", str(self.source))
        self.assertEqual(self.source.stat().st_size, 1_000_000)
        for text in ("", WRONG_KEY + "\n"): # what a lender that was killed leaves
            self.key.write_text(text)
            lend = self.lend()
            self.wait_for(lambda before=text: self.key.read_text() != before, "the lender's key")
            self.expect_ok(self.finish(self.borrow()))
            self.expect_ok(self.finish(lend))
            self.assertFalse(self.key.exists())

    def test_unusable_paths(self):
        self.socket.write_text("precious")
        self.expect(self.finish(self.lend()), "path-unusable", str(self.socket))
        self.assertEqual(self.socket.read_text(), "precious")
        self.socket.unlink()
        long = self.folder / ("x" * 120)
        self.expect(self.run_cli("lend", "--socket", long, "--from", self.source), "path-unusable", "107")
        nowhere = self.folder / "no" / "s"
        self.expect(self.run_cli("lend", "--socket", nowhere, "--from", self.source), "path-unusable", str(nowhere))

    def test_unusable_fd(self):
        self.expect(self.run_cli("lend", "--fd", 99, "--from", self.source), "path-unusable", "99")
        self.expect(self.run_cli("borrow", "--fd", 99, "--to", self.to), "path-unusable", "99")
        self.expect(self.run_cli("canary", "--serve", "--fd", 99), "path-unusable", "inherited FD 99")
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right:
            self.expect(self.over_fd("lend", left, "--from", self.source), "path-unusable")
        self.no_file_appeared()

    def test_peer_that_never_comes(self):
        result = self.expect(self.finish(self.lend("--timeout", "1")), "timeout", "no borrower came within 1 s")
        self.in_time(result, 1)
        self.assertFalse(self.socket.exists())
        self.assertFalse(self.key.exists())
        result = self.finish(self.borrow("--timeout", "0.75"))
        self.expect(result, "no-listener", f"nobody listens at '{self.socket}' within 0.75 s")
        self.in_time(result, 0.75)
        self.key.write_text(WRONG_KEY + "\n") # of a lender that was killed
        self.expect(self.finish(self.borrow("--timeout", "0.75")), "no-listener", "within 0.75 s")
        self.no_file_appeared()

    def test_peer_that_says_nothing(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
            mute.bind(str(self.socket))
            mute.listen()
            result = self.finish(self.borrow("--timeout", "1", env={"GPULOAN_KEY": WRONG_KEY}))
        self.expect(result, "timeout")
        self.in_time(result, 1)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            self.expect(self.over_fd("borrow", left, "--to", self.to, "--timeout", "1"), "timeout")

    def test_peer_that_talks_nonsense(self):
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            right.send(b"GET / HTTP/1.1\r\n\r\n")
            result = self.over_fd("lend", left, "--from", self.source, "--timeout", "5")
            self.expect(result, "peer-refused")
            result = self.over_fd("borrow", left, "--to", self.to, "--timeout", "5")
            self.assertIn(result.code, (EXIT["peer-refused"], EXIT["peer-lost"]), str(result))

    def stuck_borrower(self):
        """A borrower in the middle of its loan: its output is a pipe that nobody reads."""
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        borrow = self.start("borrow", "--socket", self.socket, "--to", pipe)
        reader = os.open(pipe, os.O_RDONLY)
        self.assertEqual(len(os.read(reader, 1)), 1)
        return borrow, reader

    def test_files_that_keep_waiting(self):
        """Pipes without another end, and a file without an end: --timeout holds for them too."""
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        self.env["TMPDIR"] = str(self.folder)
        for source in (pipe, "/dev/zero"):
            result = self.finish(self.start("lend", "--socket", self.socket, "--from", source, "--timeout", "0.3"))
            self.expect(result, "timeout", f"cannot read '{source}' within 0.3 s")
            self.in_time(result, 0.3)
        read_end, write_end = os.pipe()
        result = self.finish(self.start("demo", "-", "--timeout", "0.3", stdin=read_end))
        os.close(read_end)
        os.close(write_end)
        self.expect(result, "timeout", "cannot read 'standard input' within 0.3 s")
        result = self.finish(self.borrow("--to", pipe, "--timeout", "0.3"))
        self.expect(result, "timeout", f"cannot open '{pipe}' within 0.3 s")
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["from", "pipe"])

    def test_output_that_nobody_reads(self):
        lend = self.listening()
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        borrow = self.start("borrow", "--socket", self.socket, "--to", pipe, "--timeout", "1")
        reader = os.open(pipe, os.O_RDONLY)
        self.expect(self.finish(borrow), "timeout", f"cannot write '{pipe}' within 1 s")
        os.close(reader)
        self.assertIn(self.finish(lend).code, (EXIT["loan-failed"], EXIT["peer-lost"]))

    def test_borrower_dies_in_the_middle(self):
        lend = self.listening()
        borrow, reader = self.stuck_borrower()
        borrow.kill()
        self.finish(borrow)
        os.close(reader)
        self.expect(self.finish(lend), "peer-lost", "gpuloan lend: ")

    def test_borrower_does_not_give_back(self):
        lend = self.listening("--timeout", "2")
        borrow, reader = self.stuck_borrower()
        self.expect(self.finish(lend), "timeout", "did not give the loan back within 2 s")
        os.close(reader)
        self.assertNotEqual(self.finish(borrow).code, 0)

    def test_lender_dies_in_the_middle(self):
        lend = self.listening()
        borrow, reader = self.stuck_borrower()
        lend.kill()
        self.finish(lend)
        data = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        os.close(reader)
        result = self.finish(borrow)
        if result.code == 0: # it had read everything before it noticed
            self.assertEqual(data, self.source.read_bytes()[1:])
        else:
            self.expect(result, "peer-lost", "gpuloan borrow: the loan failed")

    def test_interrupted(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            lend = self.listening()
            lend.send_signal(number)
            result = self.finish(lend)
            self.assertEqual(result.code, 128 + number, str(result))
            self.assertIn("interrupted", result.err)
            self.assertFalse(self.socket.exists())
            self.assertFalse(self.key.exists())
        borrow = self.borrow()
        self.wait_for(lambda: list(self.folder.glob("to.*")), "the temporary file")
        borrow.send_signal(signal.SIGTERM)
        self.assertEqual(self.finish(borrow).code, 128 + signal.SIGTERM)
        self.no_file_appeared()

    def test_ignored_signals_stay_ignored(self):
        for number in (signal.SIGHUP, signal.SIGINT): # as nohup, and as '&' of a shell without job control
            before = signal.signal(number, signal.SIG_IGN)
            try:
                lend = self.listening()
            finally:
                signal.signal(number, before)
            lend.send_signal(number)
            self.expect_ok(self.finish(self.borrow()))
            self.expect_ok(self.finish(lend))

    def test_required_zero_copy_is_not_to_be_had(self):
        lend = self.listening("--require-zero-copy")
        borrow = self.borrow(env={"GPULOAN_SIM_WITHOUT": "vmm"})
        self.expect(self.finish(lend), "unsupported", "cannot lend")
        self.assertNotEqual(self.finish(borrow).code, 0)
        self.no_file_appeared()

    def test_a_rung_whose_canary_fails_says_how(self):
        lend = self.listening("--rung", "vmm")
        borrow = self.borrow(env={"GPULOAN_SIM_FAIL": "cuMemcpyDtoHAsync:1+:999"})
        self.expect(self.finish(lend), "unsupported", "vmm: its canary failed with this peer: shape contiguous", "cuMemcpyDtoHAsync")
        self.assertNotEqual(self.finish(borrow).code, 0)

    # J2
    def test_no_driver_and_no_device(self):
        missing = str(self.folder / "libcuda.so.1")
        self.expect(self.finish(self.lend("--driver", missing)), "no-driver", missing)
        self.expect(self.finish(self.borrow("--driver", missing)), "no-driver", missing)
        self.expect(self.finish(self.lend("--device", "7")), "no-driver", "7")
        for code in ("34", "100", "803", "804"):
            self.expect(self.finish(self.lend(env={"GPULOAN_SIM_INIT_RESULT": code})), "no-driver", "gpuloan lend: ")


if __name__ == "__main__":
    unittest.main()
