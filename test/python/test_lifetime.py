# SPDX-License-Identifier: MIT
"""Who keeps what, and until when: references, DLPack consumers, close, fork, the end of the interpreter."""
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import threading
import time
import unittest
import warnings
import weakref
from unittest import mock

from support import Case, HERE, PATIENCE, collect, descriptors, eventually, main, python, worker
import fakes
import gpuloan


class Kept(Case):
    """The parent's tensors, while they are lent."""

    def test_until_release(self):
        peer = self.spawn("mirror")
        tensor = fakes.Torch("uint8", (4,), b"abcd")
        gone = weakref.ref(tensor)
        loan = peer.lend(tensor, keep_open=True)
        del tensor
        self.parent.next_result(PATIENCE)
        loan.wait_done(PATIENCE)
        collect()
        self.assertIsNotNone(gone())  # DONE is not RELEASE
        loan.reclaim(PATIENCE)
        eventually(lambda: gone() is None, "the tensor is let go, without any call")
        self.assertEqual(fakes.Block.live, 0)

    def test_loan_that_ends_before_lend_returns(self):
        """Its events come first, and are not lost."""
        peer = self.spawn("failing_loan")
        register = self.parent._register

        def late(*arguments):
            eventually(lambda: self.parent._early, "an event of a loan that is not registered yet")
            register(*arguments)

        self.parent._register = late
        tensor = fakes.Torch("uint8", (4,), b"abcd")
        gone = weakref.ref(tensor)
        loan = peer.lend(tensor)
        del tensor
        self.assertEqual(loan._outcome, (-21, "cannot read this"))
        eventually(lambda: gone() is None, "the tensor is let go")
        self.assertEqual((self.parent._early, self.parent._loans), ({}, {}))

    def test_two_threads_look_at_once(self):
        """One may let go of a tensor, and lend another whose semaphore has the address of the first, while the other looks."""
        first, second = object(), object()
        address = gpuloan._keep(first)
        buffer = gpuloan._kept[address][0]
        gpuloan._libc.sem_post(ctypes.c_void_p(address))
        gpuloan._lingering.add(address)
        real, threads = gpuloan._libc.sem_getvalue, []

        def other():
            gpuloan._drop_released()
            gpuloan._kept[address] = (buffer, second)

        def look(*arguments):
            real(*arguments)
            if not threads:
                threads.append(threading.Thread(target=other))
                threads[0].start()
                threads[0].join(0.3)

        with mock.patch.object(gpuloan._libc, "sem_getvalue", look):
            gpuloan._drop_released()
            threads[0].join(PATIENCE)
        self.assertIs(gpuloan._kept.pop(address, (None, None))[1], second)

    def test_dlpack_producer_is_told(self):
        peer = self.spawn("mirror")
        before = len(gpuloan._exports)
        peer.lend(fakes.Dlpack("uint8", (4,), b"abcd"))
        eventually(lambda: len(gpuloan._exports) == before, "the producer's deleter was called")

    def test_worker_killed_while_it_holds(self):
        """Over ipc the tensor stays until the worker is proven gone: only the library can say when."""
        peer = self.spawn("hold")
        tensor = fakes.Torch("uint8", (4,), b"abcd")
        gone = weakref.ref(tensor)
        loan = peer.lend(tensor)
        del tensor
        with self.refused(gpuloan.LoanError):  # its other loan is returned: it holds this one now
            self.parent.next_result(PATIENCE)
        self.assertIsNotNone(gone())
        peer.process.send_signal(signal.SIGKILL)
        with self.refused(gpuloan.PeerError):
            loan.wait(PATIENCE)
        eventually(lambda: gone() is None, "the tensor is let go once the worker is proven gone")
        self.assertEqual(gpuloan._kept, {})
        eventually(lambda: peer.lost is not None, "the peer is known to be lost")

    def test_beyond_close(self):
        """close() with a loan out: the tensor is kept until the library has released it, for which close() waits a while."""
        for wait in (0, PATIENCE):
            with self.subTest(wait=wait), mock.patch.object(gpuloan, "_PROOF_WAIT", wait):
                parent = gpuloan.Exporter()
                self.addCleanup(parent.close)
                peer = parent.spawn(worker("leaves_child"), timeout=PATIENCE, start_new_session=True)
                process = peer.process
                tensor = fakes.Torch("uint8", (4,), b"abcd")
                gone = weakref.ref(tensor)
                peer.lend(tensor)
                del tensor
                self.assertEqual(process.wait(PATIENCE), 0)
                closing = threading.Thread(target=parent.close)
                closing.start()
                closing.join(0.2 if wait else PATIENCE)
                self.assertEqual(closing.is_alive(), bool(wait))
                collect()
                gpuloan._drop_released()
                self.assertIsNotNone(gone())  # the child still maps it
                os.killpg(process.pid, signal.SIGKILL)
                closing.join(PATIENCE)
                self.assertFalse(closing.is_alive())
                if not wait:
                    eventually(lambda: gpuloan._drop_released() or gone() is None, "released after the child's death")
                self.assertIsNone(gone())

    def test_results(self):
        peer = self.spawn("many", "3")
        results = [self.parent.next_result(PATIENCE) for _ in range(3)]
        eventually(lambda: self.parent.stats().loans_out == 0, "the loans are over")
        self.assertEqual(self.parent.stats().live_bytes, 3 * 4096)
        consumer = fakes.Consumer(results[0].__dlpack__())
        del results
        collect()
        self.assertEqual(self.parent.stats().live_bytes, 4096)  # the consumer's
        peer.close()
        buffer = ctypes.create_string_buffer(4)
        fakes.driver.copy("DtoH", ctypes.addressof(buffer), consumer.pointer, 4, 1)
        self.assertEqual(len(set(buffer.raw)), 1)  # still mapped, without the worker
        consumer.release()
        self.assertEqual(self.parent.stats().live_bytes, 0)

    def test_result_that_is_lent_is_destroyed_later(self):
        peer = self.spawn("many", "1")
        result = self.parent.next_result(PATIENCE)
        other = self.spawn("hold")
        loan = other.lend(result)
        del result
        collect()
        self.assertEqual(self.parent.stats().live_bytes >= 4096, True)
        loan.cancel()
        other.process.kill()
        with self.refused(gpuloan.LoanError):
            loan.wait(PATIENCE)
        del loan
        eventually(lambda: collect() or self.parent.stats().live_bytes == 0, "the region went")
        del peer

    def test_busy_regions_are_tried_again(self):
        self.spawn("many", "200")
        for _ in range(200):
            self.parent.next_result(PATIENCE)  # dropped at DONE, often before RELEASE
        eventually(lambda: self.parent.stats().live_bytes == 0, "every region is destroyed")
        self.assertFalse(self.parent._context.has_busy())


class Borrowers(Case):
    """The worker's side; it tells what it saw by results."""

    def test_dlpack_consumer_holds_the_loan(self):
        peer = self.spawn("owner")
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"exported")
        with self.refused(gpuloan.Timeout):
            loan.wait(0.2)
        peer.lend(fakes.Torch("uint8", (4,), b"abcd"), user=b"go on")
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"released")
        with self.refused(gpuloan.LoanError) as caught:
            loan.wait(PATIENCE)
        self.assertEqual(caught.error.name, "GPULOAN_ERR_RETURNED")  # nobody said done

    def test_after_done(self):
        loan = self.spawn("twice").lend(fakes.Torch("uint8", (4,), b"abcd"))
        said = json.loads(self.parent.next_result(PATIENCE).user)
        self.assertEqual(said, ["GPULOAN_ERR_STATE"] * 6)
        loan.wait(PATIENCE)

    def test_read_only(self):
        self.spawn("read_only").lend(fakes.Torch("uint8", (3,), b"abc"))
        text, flags = json.loads(self.parent.next_result(PATIENCE).user)
        self.assertIn("lent for read", text)
        self.assertEqual(flags, [1, True])

    def test_parent_dies(self):
        """A worker whose parent is killed gets PeerError, not None, and ends."""
        code = ("import gpuloan, os, signal, sys\n"
                "parent = gpuloan.Exporter()\n"
                f"peer = parent.spawn({worker('mirror')!r}, stderr=sys.stderr)\n"
                "print(peer.pid, flush=True)\n"
                "os.kill(os.getpid(), signal.SIGKILL)\n")
        result = python(code)
        self.assertEqual(result.returncode, -signal.SIGKILL)
        self.assertIn("PeerError", result.stderr)


class Closed(Case):
    def test_arrays_and_loans_after_close(self):
        peer = self.spawn("hold")
        many = self.spawn("many", "1")
        result = self.parent.next_result(PATIENCE, many)
        consumer = fakes.Consumer(result.__dlpack__())
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        self.parent.close()
        self.parent.close()
        for call in (lambda: result.pointer, lambda: result.__dlpack__(), result.copy_to_host, loan.report, lambda: loan.wait(1),
                     peer.info, lambda: peer.lend(fakes.Torch("uint8", (1,), b"x")), self.parent.stats, lambda: self.parent.next_result(1)):
            with self.refused(gpuloan.CallError, "closed"):
                call()
        consumer.release()
        result = loan = peer = many = call = None
        collect()

    def test_close_ends_waits_of_other_threads(self):
        peer = self.spawn("hold")
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        ends = []

        def wait(function):
            try:
                function()
            except gpuloan.Error as error:
                ends.append(error.name)

        threads = [threading.Thread(target=wait, args=(function,)) for function in (loan.wait, self.parent.next_peer)]
        for thread in threads:
            thread.start()
        self.parent.close()
        for thread in threads:
            thread.join(PATIENCE)
        self.assertEqual(len(ends), 2)

    def test_close_waits_for_calls(self):
        """No call with a handle may run during or after destroy."""
        inside, go, order = threading.Event(), threading.Event(), []

        def slow():
            inside.set()
            go.wait(PATIENCE)
            order.append("call")
            return 0

        destroy = gpuloan._lib.gpuloan_context_destroy
        with mock.patch.object(gpuloan._lib, "gpuloan_context_destroy", lambda handle: (order.append("destroy"), destroy(handle))):
            threads = [threading.Thread(target=self.parent._context.status, args=(slow,)), threading.Thread(target=self.parent.close)]
            threads[0].start()
            inside.wait(PATIENCE)
            threads[1].start()
            threads[1].join(0.2)
            self.assertTrue(threads[1].is_alive())
            go.set()
            for thread in threads:
                thread.join(PATIENCE)
        self.assertEqual(order, ["call", "destroy"])

    def test_twenty_parents_leave_nothing(self):
        self.parent.close()
        before = None
        for number in range(20):
            with gpuloan.Exporter() as parent:
                peer = parent.spawn(worker("mirror"), timeout=PATIENCE)
                peer.lend(fakes.Torch("uint8", (1,), b"\x00"))
                self.assertEqual(parent.next_result(PATIENCE).copy_to_host(), b"\xff")
            self.assertEqual(peer.process.returncode, 0)
            if number == 2:
                before = descriptors(), threading.active_count()
        # The library watches a loan that was out at close until its worker is proven gone, and has a descriptor for that.
        eventually(lambda: gpuloan._drop_released() or (descriptors() <= before[0] and threading.active_count() <= before[1]),
                   "no descriptor and no thread is left")

    def test_worker_that_does_not_end_is_killed(self):
        peer = self.spawn("mirror")
        os.kill(peer.pid, signal.SIGSTOP)
        started = time.monotonic()
        self.parent.close(timeout=0.2)
        self.assertEqual(peer.process.returncode, -signal.SIGKILL)
        self.assertLess(time.monotonic() - started, 30)


def _kill(child):
    """Of a forked child that may have ended."""
    with contextlib.suppress(ChildProcessError):  # it was waited for
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class Forked(Case):
    def test_child_is_refused_everything_and_ends(self):
        peer = self.spawn("hold")
        many = self.spawn("many", "1")
        result = self.parent.next_result(PATIENCE, many)
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        held, forked = threading.Event(), threading.Event()

        def hold():  # the locks, as a thread may that is in the middle of a call
            with self.parent._context.events, self.parent._context.lock:
                held.set()
                forked.wait(PATIENCE)

        holder = threading.Thread(target=hold)
        holder.start()
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which are what this is about
            held.wait(PATIENCE)
            child = os.fork()
        if child == 0:
            said = []
            try:
                for call in (loan.report, lambda: loan.wait(5), peer.info, lambda: self.parent.next_result(5),
                             lambda: self.parent.next_peer(5), self.parent.stats, lambda: result.pointer, lambda: peer.lend(result)):
                    try:
                        said.append(repr(call()))
                    except gpuloan.ProcessError as error:
                        said.append(error.name)
                    except Exception as error:
                        said.append(repr(error))
                result = loan = call = None
                collect()
                self.parent.close()
                said.append("closed")
            finally:
                os.write(write, json.dumps(said).encode())
                os._exit(0)
        forked.set()
        holder.join(PATIENCE)
        os.close(write)
        self.addCleanup(_kill, child)
        eventually(lambda: os.waitpid(child, os.WNOHANG)[0] == child, "the child ends")
        with os.fdopen(read) as pipe:
            self.assertEqual(json.load(pipe), ["GPULOAN_ERR_FORKED"] * 8 + ["closed"])
        self.assertEqual(len(result.copy_to_host()), 4096)  # nothing of ours changed
        eventually(lambda: self.parent.stats().loans_out == 1, "the worker's request and its canaries end, its loan does not")

    def test_child_is_handed_nothing_that_the_parent_had_not_taken(self):
        peer = self.spawn("fails_with_its_request")
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        with self.refused(gpuloan.LoanError, "no such layer"):
            loan.wait(PATIENCE)  # the failed result is queued by now
        calls = (lambda: self.parent.next_result(0), lambda: self.parent.next_result(5, peer), lambda: asyncio.run(self.parent.result()),
                 lambda: loan.ended, lambda: peer.lost, lambda: peer.empty(1, "uint8"), lambda: self.parent.spawn(["/bin/false"]))
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))  # nobody else would end it
            try:
                said = []
                for call in calls:
                    try:
                        said.append(repr(call()))
                    except Exception as error:
                        said.append(getattr(error, "name", None) or repr(error))
                os.write(write, json.dumps(said).encode())
            finally:
                os._exit(0)
        os.close(write)
        self.addCleanup(_kill, child)
        with os.fdopen(read) as pipe:
            self.assertEqual(json.load(pipe), ["GPULOAN_ERR_FORKED"] * len(calls))
        with self.refused(gpuloan.LoanError, "no such layer"):
            self.parent.next_result(0)


class InterpreterExit(unittest.TestCase):
    """Programs that end with things out: they have to end, with their own exit code and without a word."""

    head = f"import gpuloan, fakes, sys\nworker = lambda *a: [sys.executable, '-W', 'error', {str(HERE / 'jobs.py')!r}, *a]\n"

    def ends(self, code):
        result = python(self.head + code)
        self.assertEqual((result.returncode, result.stderr), (7, ""))

    def test_parent(self):
        self.ends("parent = gpuloan.Exporter()\n"
                  "peer = parent.spawn(worker('hold'))\n"
                  "many = parent.spawn(worker('many', '2'))\n"
                  "loan = peer.lend(fakes.Torch('uint8', (4,), b'abcd'))\n"
                  "result = parent.next_result(30, many)\n"
                  "consumer = fakes.Consumer(result.__dlpack__())\n"
                  "capsule = result.__dlpack__(max_version=(1, 0))\n"
                  "cycle = [result]; cycle.append(cycle)\n"
                  "sys.exit(7)\n")

    def test_parent_with_a_thread_in_a_wait(self):
        self.ends("import threading\n"
                  "parent = gpuloan.Exporter()\n"
                  "def wait():\n"
                  "    try: parent.next_peer()\n"
                  "    except gpuloan.Error: pass\n"
                  "threading.Thread(target=wait, daemon=True).start()\n"
                  "sys.exit(7)\n")

    def test_worker_with_loans(self):
        with gpuloan.Exporter() as parent:
            peer = parent.spawn(worker("linger"), timeout=PATIENCE)
            tensor = fakes.Torch("uint8", (4,), b"abcd")
            loans = [peer.lend(tensor), peer.lend(tensor)]
            self.assertEqual(peer.process.wait(PATIENCE), 0)
            with self.assertRaises(gpuloan.Error):
                loans[0].wait(PATIENCE)


if __name__ == "__main__":
    main()
