# SPDX-License-Identifier: MIT
"""What newcomers do wrong or wait for, and what they are told: forgotten done(), denied requests, workers that die, numbers that are
none, simulated memory in a framework, Ctrl-C."""
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import unittest
from unittest import mock

from support import Case, HERE, MODULE, PATIENCE, eventually, main, python
import fakes
import gpuloan


class Forgotten(Case):
    """A worker that lets go of what it has without done(): whoever waits, without a time limit as well, is told so."""

    def test_results(self):
        for how in ("dropped", "array", "cycle", "exit"):
            with self.subTest(how):
                peer = self.spawn("forgets_result", how)
                with self.refused(gpuloan.LoanError, "let go of the result without done()", "fail()") as caught:
                    self.parent.next_result(None, peer)
                self.assertEqual((caught.error.name, caught.error.user), ("GPULOAN_ERR_RETURNED", how.encode()))
                peer.close()

    def test_loan(self):
        loan = self.spawn("forgets").lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError, "let go of the loan without done()"):
            loan.wait()

    def test_awaited(self):
        peer = self.spawn("forgets_result", "dropped")
        with self.refused(gpuloan.LoanError, "let go of the result without done()"):
            asyncio.run(asyncio.wait_for(self.parent.result(peer), PATIENCE))

    def test_loans_of_a_worker_that_ends(self):
        loan = self.spawn("ends_holding").lend(fakes.Torch("uint8", (4,), b"abcd"))
        with self.refused(gpuloan.LoanError, "let go of the loan without done()"):
            loan.wait(PATIENCE)

    def test_garbage_is_collected_seldom(self):
        """A worker that holds a loan and polls pays for it at most once a second."""
        ours, theirs = pair(self.parent)
        with theirs:
            ours.lend(fakes.Torch("uint8", (4,), b"abcd"))
            loan = theirs.next_loan(PATIENCE)
            loan.tensor
            with mock.patch("gc.collect") as collect:
                for _ in range(50):
                    with self.assertRaises(gpuloan.Timeout):
                        theirs.next_loan(0.001)
            self.assertEqual(collect.call_count, 1)
            loan.done()
            with mock.patch("gc.collect") as collect:
                theirs._sweep_at = 0.0
                with self.assertRaises(gpuloan.Timeout):
                    theirs.next_loan(0.001)
            self.assertEqual(collect.call_count, 0)  # nothing is held


def pair(parent):
    """A peer of the parent's whose worker is in this process."""
    end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = []
    with mock.patch.dict(os.environ, GPULOAN_FD=str(other.detach())):
        thread = threading.Thread(target=lambda: made.append(gpuloan.worker(timeout=PATIENCE)))
        thread.start()
        peer = parent.attach(end, timeout=PATIENCE)
        thread.join(PATIENCE)
    return peer, made[0]


class Denied(Case):
    options = {"account_bytes": 64 << 20}

    def test_error_is_told_once(self):
        """To the worker, whose request it was; the parent's next result is the next result."""
        peer = self.spawn("refused_memory", str(1 << 30))
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError, "LoanError", "account"):  # its job failed
            loan.wait(PATIENCE)
        result = self.parent.next_result(PATIENCE, peer)
        self.assertEqual(result.user, b"text")
        self.assertIn(b"GPULOAN_ERR_DENIED: ", result.copy_to_host())
        self.assertEqual(list(self.parent._results), [])

    def test_failed_request_is_seen_before_its_failed_loan(self):
        """Who waits for the loan finds what failed with it in the queue, and can leave it behind."""
        peer = self.spawn("fails_with_its_request")
        for _ in range(20):
            with self.refused(gpuloan.LoanError, "no such layer"):
                peer.lend(fakes.Torch("uint8", (3,), b"abc")).wait(PATIENCE)
            with self.refused(gpuloan.LoanError, "no such layer") as caught:
                self.parent.next_result(0, peer)
            self.assertEqual(caught.error.user, b"asked")

    def test_done_is_not_waited_for_where_it_will_not_come(self):
        """A cancelled loan of a worker that is stuck: wait_done says so at once."""
        peer = self.spawn("hold")
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        os.kill(peer.pid, signal.SIGSTOP)
        loan.cancel("no longer wanted")
        with mock.patch.object(self.parent, "_catch_up", side_effect=AssertionError("it has not ended")):
            with self.refused(gpuloan.LoanError, "no longer wanted"):
                loan.wait_done(PATIENCE)
        peer.process.kill()


class Deaths(Case):
    """How the process ended is in the error, where the parent started it."""

    def test_signal(self):
        peer = self.spawn("die")
        words = (f"process {peer.process.pid}", "was killed by SIGKILL")
        with self.refused(gpuloan.PeerError, *words):
            self.parent.next_result(PATIENCE)
        with self.refused(gpuloan.PeerError, "no result will come", *words):
            self.parent.next_result(PATIENCE, peer)
        eventually(lambda: peer.lost, "the loss is known")
        self.assertEqual(peer.lost.count("SIGKILL"), 1)
        with self.refused(gpuloan.PeerError, *words):
            peer.lend(fakes.Torch("uint8", (3,), b"abc"))

    def test_exit_code(self):
        peer = self.spawn("exits", "41")
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.PeerError, "ended with exit code 41"):
            loan.wait(PATIENCE)

    def test_awaited(self):
        peer = self.spawn("exits", "42")
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))

        async def wait():
            await loan

        with mock.patch.object(time, "sleep", side_effect=AssertionError("the loop was blocked")):
            with self.refused(gpuloan.PeerError, "ended with exit code 42"):
                asyncio.run(asyncio.wait_for(wait(), PATIENCE))

    def test_connection_that_this_side_closed(self):
        peer = self.spawn("hold")
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        peer.close()
        with self.refused(gpuloan.PeerError) as caught:
            loan.wait(PATIENCE)
        self.assertNotIn("process", str(caught.error))


class Failed(Case):
    def test_words_that_utf8_cannot_say(self):
        """A file name's, say: the block's own exception goes on, and the parent is told."""
        ours, theirs = pair(self.parent)
        with theirs:
            with self.assertRaisesRegex(ValueError, "caf"):
                with theirs.request(4, "uint8", timeout=PATIENCE):
                    raise ValueError("cannot open " + os.fsdecode(b"caf\xe9"))
            with self.refused(gpuloan.LoanError, "ValueError: cannot open caf\\udce9"):
                self.parent.next_result(PATIENCE)

    def test_done_beside_a_thread_that_waits_for_loans(self):
        """It does not wait for that thread, which has the lock of the events meanwhile."""
        ours, theirs = pair(self.parent)
        with theirs:
            results = [theirs.request(4, "uint8", timeout=PATIENCE) for _ in range(2)]
            for out in results:
                out.tensor
            held, over = threading.Event(), threading.Event()

            def hold():
                with theirs._context.events:
                    held.set()
                    over.wait(PATIENCE)

            thread = threading.Thread(target=hold)
            thread.start()
            held.wait(PATIENCE)
            results[0].done()
            self.parent.next_result(PATIENCE)
            results[1].fail("so")
            with self.assertRaises(gpuloan.Timeout):
                theirs.next_loan(0)
            self.assertTrue(thread.is_alive())
            over.set()
            thread.join(PATIENCE)
            with self.refused(gpuloan.LoanError, "so"):
                self.parent.next_result(PATIENCE)

    def test_result_that_goes_on_while_its_worker_lets_go(self):
        """The moment between done() and the end of the worker's loan, made longer."""
        ours, theirs = pair(self.parent)
        with theirs:
            out = theirs.request(4, "uint8", timeout=PATIENCE)
            out.tensor
            out.done()
            result = self.parent.next_result(PATIENCE)
            busy = gpuloan._error(gpuloan._BUSY, "it is lent for write")
            real = self.parent._context.call
            for refusals in (1, 2):
                left = [busy] * refusals

                def call(function, *arguments):
                    if function is gpuloan._lib.gpuloan_lend and left:
                        raise left.pop()
                    real(function, *arguments)

                with mock.patch.object(self.parent._context, "call", call):
                    if refusals == 2:
                        with self.refused(gpuloan.CallError, "lent for write"):
                            ours.lend(result)
                        return
                    loan = ours.lend(result)
                with theirs.next_loan(PATIENCE):
                    pass
                loan.wait(PATIENCE)

    def test_twice(self):
        ours, theirs = pair(self.parent)
        with theirs:
            for first in ("done", "fail"):
                out = theirs.request(4, "uint8", timeout=PATIENCE)
                out.tensor
                getattr(out, first)()
                for second in (out.done, out.fail):
                    with self.refused(gpuloan.CallError, f"{first}() was said of this loan already"):
                        second()


class Numbers(Case):
    def test_times_and_texts(self):
        for timeout in (float("nan"), 10**400, "5"):
            with self.assertRaisesRegex(gpuloan.CallError, "timeout is .* seconds"):
                self.parent.next_result(timeout)
            with self.assertRaisesRegex(gpuloan.CallError, "timeout is .* seconds"):
                gpuloan.connect("/nowhere", "0" * 64, timeout=timeout)
        with self.assertRaises(gpuloan.PeerError):
            gpuloan.connect("/nowhere", "0" * 64, timeout=float("inf"))
        peer = self.spawn("hold")
        tensor = fakes.Torch("uint8", (3,), b"abc")
        for words, call in (("key is 7", lambda: gpuloan.connect("/nowhere", 7)), ("account is None", lambda: self.parent.invite(None)),
                            ("end is 'x'", lambda: self.parent.attach("x")), ("rungs is 3.5", lambda: peer.lend(tensor, rungs=3.5)),
                            ("user is None", lambda: peer.lend(tensor, user=None)), ("reason is 5", lambda: peer.lend(tensor).cancel(5))):
            with self.assertRaisesRegex(gpuloan.CallError, words):
                call()
        peer.close()
        with self.refused(gpuloan.CallError, "closed by close()"):
            peer.info()

    def test_shapes(self):
        ours, theirs = pair(self.parent)
        with theirs:
            for ask in (lambda shape: theirs.request(shape, "uint8", timeout=PATIENCE), lambda shape: ours.empty(shape, "uint8")):
                for shape, words in (((4.5,), r"shape\[0\] of \(4.5,\) is 4.5"), (4.0, "shape is 4.0"), (("4",), r"shape\[0\].*'4'"),
                                     ((2, None), r"shape\[1\]")):
                    with self.assertRaisesRegex(TypeError, words + ".*integer"):
                        ask(shape)
                for shape, words in (((2, -1), r"shape\[1\] of \(2, -1\) is -1"), (-3, "shape is -3"),
                                     ((1 << 62, 2), "more than any memory"), ((1 << 70,), "has to be from 0")):
                    with self.assertRaisesRegex(ValueError, words):
                        ask(shape)
                index = type("Index", (), {"__index__": lambda self: 3})()  # as NumPy's integers
                made = ask((index, 2))
                self.assertEqual((made.tensor if hasattr(made, "tensor") else made).shape, (3, 2))
            for alignment, kind in ((0.5, TypeError), (-1, ValueError)):
                with self.assertRaisesRegex(kind, "alignment"):
                    theirs.request(4, "uint8", alignment=alignment)
                with self.assertRaisesRegex(kind, "alignment"):
                    ours.empty(4, "uint8", alignment=alignment)

    def test_tensors_of_others(self):
        peer = self.spawn("mirror")
        tensor = fakes.Cuda("uint8", (4,), b"abcd")
        tensor.shape = (4.5,)
        with self.assertRaisesRegex(TypeError, r"shape\[0\].*4.5"):
            peer.lend(tensor)
        tensor = fakes.Torch("uint8", (4,), b"abcd", strides=(1.5,))
        with self.assertRaisesRegex(TypeError, r"stride\[0\] is 1.5"):
            peer.lend(tensor)

    def test_options(self):
        for options, kind, words in (({"slots": 1.5}, TypeError, "slots is 1.5"), ({"slots": 1 << 32}, ValueError, "4294967295"),
                                     ({"idle_bytes": -1}, ValueError, "idle_bytes is -1"), ({"account_bytes": "9"}, TypeError, "'9'"),
                                     ({"device": 0.0}, TypeError, "device is 0.0"), ({"device": -2}, ValueError, "device is -2"),
                                     ({"gpu_wait_limit": 1 << 40}, ValueError, "gpu_wait_limit")):
            with self.subTest(options=options), self.assertRaisesRegex(kind, words):
                gpuloan.Exporter(**options).close()
        for call in (gpuloan.device_info, gpuloan.pool_install, gpuloan.pool_uninstall):
            with self.assertRaisesRegex(TypeError, "device is 1.5"):
                call(1.5)

    def test_rungs_that_leave_nothing(self):
        peer = self.spawn("mirror")
        for rungs in ("none", 0, gpuloan.Rung.NONE, [], "", ["none"]):
            for call in (lambda: gpuloan.Exporter(rungs=rungs), lambda: peer.lend(fakes.Torch("uint8", (1,), b"x"), rungs=rungs)):
                with self.subTest(rungs=rungs), self.refused(gpuloan.CallError, "nothing to lend over", "'vmm'", "leave it out"):
                    call()
        with self.refused(gpuloan.CallError, "device=-1", "'host'"):
            gpuloan.Exporter(device=-1, rungs="vmm")


class Simulated(Case):
    def test_frameworks_are_refused(self):
        self.spawn("many", "1")
        array = self.parent.next_result(PATIENCE)
        for view, name in ((array.torch, "PyTorch"), (array.cupy, "CuPy"), (array.jax, "JAX"), (array.numba, "numba")):
            with self.refused(gpuloan.CallError, "simulated", "no CUDA address", name, "copy_to_host()", "numpy.frombuffer"):
                view()

    def test_host_memory_is_real(self):
        torch = types.ModuleType("torch")
        torch.uint8, torch.__version__ = "torch.uint8", "0"
        taken = types.SimpleNamespace(dtype="torch.uint8")
        torch.utils = types.SimpleNamespace(dlpack=types.SimpleNamespace(from_dlpack=lambda capsule: taken))
        peer = self.spawn("mirror")
        with mock.patch.dict(sys.modules, torch=torch):
            self.assertIs(peer.empty(4, "uint8", memory="host").torch(), taken)


class Interrupted(unittest.TestCase):
    """Ctrl-C while something is waited for. The bound here is for loaded machines; alone it is 0.1 s and less."""

    head = ("import gpuloan, fakes, os, socket, sys, time\n"
            f"worker = lambda *a: [sys.executable, '-W', 'error', {str(HERE / 'jobs.py')!r}, *a]\n"
            "def attempt(call):\n"
            "    print('waiting', flush=True)\n"
            "    try: call()\n"
            "    except KeyboardInterrupt: print(time.monotonic(), flush=True); raise\n")

    def interrupt(self, code, ends_within=PATIENCE):
        code = f"import sys; sys.path[:0] = [{str(MODULE.parent)!r}, {str(HERE)!r}]\n" + self.head + code
        child = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(child.kill)
        with child.stdout, child.stderr:
            self.assertEqual(child.stdout.readline(), "waiting\n", child.stderr.read() if child.poll() else "")
            time.sleep(0.3)  # until it waits; an earlier signal is as good
            sent = time.monotonic()
            child.send_signal(signal.SIGINT)
            heard = float(child.stdout.readline())
            self.assertLess(heard - sent, 1.5)
            self.assertIn("KeyboardInterrupt", child.stderr.read())
        child.wait(PATIENCE)
        self.assertLess(time.monotonic() - sent, ends_within)
        return heard - sent

    def test_parent(self):
        held = ("with gpuloan.Exporter() as parent:\n"
                " idle, peer = parent.spawn(worker('mirror')), parent.spawn(worker('hold'))\n"
                " loan = peer.lend(fakes.Torch('uint8', (4,), b'abcd'))\n")
        for wait in ("loan.wait", "loan.wait_done", "lambda: parent.next_result(None, idle)", "parent.next_peer",
                     "lambda: loan.reclaim(60)"):
            with self.subTest(wait):
                self.interrupt(held + f" attempt({wait})\n")

    def test_parent_whose_worker_does_not_end(self):
        """It is killed soon: within a `with` block and without one."""
        stopped = " parent.spawn(worker('deaf'))\n attempt(parent.next_result)\n"
        for start in ("with gpuloan.Exporter() as parent:\n", "if True:\n parent = gpuloan.Exporter()\n"):
            with self.subTest(start):
                self.interrupt(start + stopped, 3.5)

    def test_worker(self):
        with gpuloan.Exporter() as parent:
            for wait in ("peer.next_loan", "lambda: peer.request(8, 'uint8', timeout=None)"):
                with self.subTest(wait):
                    self.answering(parent, f"peer = gpuloan.worker()\nattempt({wait})\n")

    def answering(self, parent, code):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent.attach(ours, timeout=0)
        never = threading.Event()
        parent.grant = lambda request: never.wait(PATIENCE)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            with mock.patch.dict(os.environ, GPULOAN_FD=str(theirs.fileno())), \
                    mock.patch.object(subprocess, "Popen", inheriting(theirs.fileno())):
                self.interrupt(code)
        never.set()

    def test_worker_whose_parent_does_not_answer(self):
        """The handshake's 30 s, and the process ends as well."""
        code = ("ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
                "os.environ['GPULOAN_FD'] = str(theirs.detach())\n"
                "attempt(lambda: gpuloan.worker(timeout=30))\n")
        self.interrupt(code, 10)
        code = ("import tempfile\n"
                "folder = tempfile.TemporaryDirectory()\n"
                "path = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); path.bind(folder.name + '/s'); path.listen()\n"
                "attempt(lambda: gpuloan.connect(folder.name + '/s', '0' * 64))\n")
        self.interrupt(code, 10)


def inheriting(number):
    real = subprocess.Popen
    return lambda *arguments, **options: real(*arguments, pass_fds=(number,), **options)


class ClosedInASignalHandler(unittest.TestCase):
    """As of SIGTERM: it cannot wait for the call that it interrupted."""

    def run_program(self, code):
        result = python("import gpuloan, os, signal, threading, fakes\nfrom support import worker\n" + code)
        self.assertEqual((result.stdout, result.returncode), ("closed\nCallError\n", 0), result.stderr)

    def test_parent(self):
        self.run_program("parent = gpuloan.Exporter()\n"
                         "loan = parent.spawn(worker('hold')).lend(fakes.Torch('uint8', (4,), b'abcd'))\n"
                         "signal.signal(signal.SIGTERM, lambda *_: (parent.close(), print('closed')))\n"
                         "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
                         "try: loan.wait(60)\n"
                         "except gpuloan.Error as error: print(type(error).__name__)\n")

    def test_worker(self):
        """While it has the lock of its events, too."""
        self.run_program("from test_misuse import pair\n"
                         "with gpuloan.Exporter() as parent:\n"
                         " peer = pair(parent)[1]\n"
                         " signal.signal(signal.SIGTERM, lambda *_: (peer.close(), print('closed')))\n"
                         " threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
                         " try:\n"
                         "  for loan in peer: pass\n"
                         " except gpuloan.Error as error: print(type(error).__name__)\n")


if __name__ == "__main__":
    main()
