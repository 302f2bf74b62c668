# SPDX-License-Identifier: MIT
"""Loans and requests from both sides: outcomes, turns, grants, results of workers that fail, connections."""
import asyncio
import contextlib
import gc
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from support import Case, PATIENCE, collect, descriptors, eventually, main, python, worker
import fakes
import gpuloan


class Outcomes(Case):
    def test_report(self):
        peer = self.spawn("mirror")
        loan = peer.lend(fakes.Torch("uint8", (4,), b"abcd"))
        result = self.parent.next_result(PATIENCE)
        loan.wait(PATIENCE)
        report = loan.report()
        self.assertTrue(loan.ended)
        self.assertEqual((report.ended, report.outcome, report.outcome_name), (1, 0, "GPULOAN_OK"))
        self.assertEqual(str(report.memory_state), "released")
        self.assertEqual(list(report.steps), ["EXPORT", "READY", "IMPORT", "WRITE", "DONE", "UNIMPORT", "ACK", "RELEASE"])
        self.assertEqual(sorted(report.steps.values()), list(report.steps.values()))
        self.assertNotIn(0, report.steps.values())
        self.assertEqual((report.rung, f"{report.rung}"), (gpuloan.Rung.IPC, "ipc"))  # cuMemAlloc memory
        self.assertEqual(str(result.report.rung), "vmm")  # the arena's

    def test_rungs_gates_and_policy(self):
        peer = self.spawn("mirror")
        tensor = fakes.Torch("uint8", (4,), b"abcd")
        for options, rung, gate in (({"rungs": "host"}, "host", "memop"), ({"rungs": ["vmm", "host"]}, "vmm", "memop"),
                                    ({"gate": "host"}, "ipc", "host"), ({"memory": "host"}, "host", "memop")):
            with self.subTest(options=options):
                report = peer.lend(tensor, **options).report()
                self.assertEqual((str(report.rung), str(report.gate)), (rung, gate))
                self.parent.next_result(PATIENCE)
        with self.refused(gpuloan.CallError, "zero"):
            peer.lend(tensor, rungs="host", policy="zero_copy")

    def test_turns(self):
        peer = self.spawn("turns")
        tensor = fakes.Torch("uint8", (3,), bytes(3))
        loan = peer.lend(tensor, "write", keep_open=True)
        for turn in range(1, 5):
            loan.wait_done(PATIENCE)
            self.assertEqual(tensor.block.read(), bytes([turn] * 3))
            if turn < 4:
                loan.ready()
        loan.reclaim(PATIENCE)
        self.assertEqual(loan.report().turns_done, 4)
        peer.process.wait(PATIENCE)
        self.assertEqual(peer.process.returncode, 0)

    def test_timeout_and_cancel(self):
        peer = self.spawn("hold")
        loan = peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.Timeout) as caught:
            loan.wait(0.05)
        self.assertIsInstance(caught.error, TimeoutError)
        self.assertEqual((caught.error.status, caught.error.name), (-2, "GPULOAN_ERR_TIMEOUT"))
        loan.cancel("no longer wanted")
        peer.process.kill()
        with self.refused(gpuloan.LoanError, "no longer wanted") as caught:
            loan.wait(PATIENCE)
        self.assertEqual(caught.error.name, "GPULOAN_ERR_CANCELLED")

    def test_failed_loan(self):
        loan = self.spawn("failing_loan").lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError, "cannot read this"):
            loan.wait(PATIENCE)

    def test_reason_of_an_exception_that_ends_the_worker(self):
        loan = self.spawn("raises").lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError, "RuntimeError", "the lamp is out"):
            loan.wait(PATIENCE)

    def test_dropped_loan_is_returned(self):
        loan = self.spawn("forgets").lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError) as caught:
            loan.wait(PATIENCE)
        self.assertEqual(caught.error.name, "GPULOAN_ERR_RETURNED")

    def test_arguments_that_are_none(self):
        peer = self.spawn("mirror")
        tensor = fakes.Torch("uint8", (3,), b"abc")
        for words, arguments, options in ((["the bytes object is in CPU memory", "user"], [b"abc"], {}),
                                          (["has to be bytes"], [tensor], {"user": "text"}),
                                          (["zero_copy"], [tensor], {"policy": "zero-copy"})):
            with self.refused(gpuloan.CallError, *words):
                peer.lend(*arguments, **options)

    def test_busy(self):
        peer = self.spawn("hold")
        tensor = fakes.Torch("uint8", (3,), b"abc")
        peer.lend(tensor)
        with self.refused(gpuloan.CallError, "lent") as caught:
            peer.lend(tensor, "write")
        self.assertEqual(caught.error.name, "GPULOAN_ERR_BUSY")


class Requests(Case):
    def test_failure_is_told(self):
        peer = self.spawn("fail")
        with self.refused(gpuloan.LoanError, "ValueError", "no such layer") as caught:
            self.parent.next_result(PATIENCE)
        self.assertEqual((caught.error.user, caught.error.name), (b"will fail", "GPULOAN_ERR_FAILED"))
        self.assertIs(caught.error.peer, peer)

    def test_killed_mid_write(self):
        peer = self.spawn("die")
        with self.refused(gpuloan.PeerError) as caught:
            self.parent.next_result(PATIENCE)
        self.assertEqual(caught.error.user, b"mid-write")
        self.assertEqual(peer.process.wait(PATIENCE), -signal.SIGKILL)
        with self.refused(gpuloan.PeerError, "no result will come"):
            self.parent.next_result(PATIENCE, peer)
        with self.refused(gpuloan.PeerError, "no worker"):
            self.parent.next_result(PATIENCE)
        healthy = self.spawn("mirror")  # the next one works
        healthy.lend(fakes.Torch("uint8", (1,), b"\x01"))
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"\xfe")
        eventually(lambda: self.parent.stats().live_bytes == 0 or collect(), "the arena is empty again")

    def test_workers_killed_at_random_points(self):
        """Each kill gives everything back: memory, descriptors, what the module keeps."""
        chance = random.Random(5)
        before = None
        for number in range(20):
            peer = self.spawn(chance.choice(["many", "mirror", "hold"]), stderr=subprocess.DEVNULL)
            loans = [peer.lend(fakes.Torch("uint8", (1000,), bytes(1000))) for _ in range(3)]
            time.sleep(chance.random() * 0.05)  # the random point
            peer.process.kill()
            for loan in loans:
                with contextlib.suppress(gpuloan.PeerError, gpuloan.LoanError):  # the latter: it had come to its own end
                    loan.wait(PATIENCE)
            outcome = ""
            while "no result will come" not in outcome:
                try:
                    self.parent.next_result(PATIENCE, peer)
                except (gpuloan.PeerError, gpuloan.LoanError) as error:
                    outcome = str(error)
            peer.process.wait(PATIENCE)
            del peer, loans, loan
            eventually(lambda: collect() or (not gpuloan._kept and self.parent.stats().chunks == 0), "all memory is back")
            eventually(lambda: fakes.Block.live == 0, "the module's thread has freed the tensors")
            stats = self.parent.stats()
            self.assertEqual((stats.peers, stats.quarantined_bytes, stats.surrendered_bytes), (0, 0, 0))
            self.assertEqual((self.parent._loans, self.parent._early), ({}, {}))
            if number == 2:
                before = descriptors()
        eventually(lambda: descriptors() <= before, "no descriptor is left")

    def test_dropped_request_is_returned(self):
        peer = self.spawn("hold")
        peer.lend(fakes.Torch("uint8", (3,), b"abc"))
        with self.refused(gpuloan.LoanError) as caught:
            self.parent.next_result(PATIENCE)
        self.assertEqual((caught.error.name, caught.error.user), ("GPULOAN_ERR_RETURNED", b"held"))

    def test_grant_function(self):
        own = fakes.Torch("uint8", (16,), bytes(16))
        seen = []

        def decide(request):
            seen.append((request.shape, request.dtype, request.nbytes, request.user, request.onward))
            return {b"deny me": gpuloan.Deny("quota of 0 bytes")}.get(request.user)

        self.parent.grant = decide
        self.spawn("denied")
        text = self.parent.next_result(PATIENCE)
        self.assertIn(b"GPULOAN_ERR_DENIED: ", text.copy_to_host())
        self.assertIn(b"quota of 0 bytes", text.copy_to_host())
        self.assertEqual(seen[0], ((16,), "uint8", 16, b"deny me", False))
        # With a tensor of the parent's own.
        target = fakes.Torch("uint8", (4096,), bytes(4096))
        self.parent.grant = lambda request: target
        self.spawn("many", "1")
        result = self.parent.next_result(PATIENCE)
        self.assertEqual(result.pointer, target.address)
        self.assertEqual(target.block.read(), bytes(4096))
        # One that does not fit: both sides are told.
        self.parent.grant = lambda request: own
        self.spawn("many", "1", stderr=subprocess.DEVNULL)
        with self.refused(gpuloan.CallError, "that was granted", "(16,)", "(4096,)"):
            self.parent.next_result(PATIENCE)
        # One that raises.
        self.parent.grant = lambda request: 1 // 0
        self.spawn("denied", stderr=subprocess.DEVNULL)
        with self.assertRaises(ZeroDivisionError):
            self.parent.next_result(PATIENCE)

    def test_grant_function_that_raises_what_is_odd(self):
        """Words that UTF-8 cannot say, the end of the program, no words: both sides are told, and the next worker is answered as ever."""
        mute = type("Mute", (Exception,), {"__str__": None})()
        for error in (ValueError("no model named " + os.fsdecode(b"caf\xe9.bin")), SystemExit(3), mute):
            self.parent.grant = mock.Mock(side_effect=error)
            self.spawn("many", "1", stderr=subprocess.DEVNULL)
            with self.assertRaises(type(error)):
                self.parent.next_result(PATIENCE)
        self.parent.grant = None
        self.spawn("many", "1")
        self.parent.next_result(PATIENCE)

    def test_host_memory_for_the_worker(self):
        self.spawn("on_host")
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), bytes(range(12)))

    def test_thousand_results_leave_nothing(self):
        counts = []
        for total in (100, 1000):  # the first is to warm up
            peer = self.spawn("many", str(total))
            seen = set()
            for number in range(total):
                result = self.parent.next_result(PATIENCE, peer)
                seen.add(int(result.user))
                if number % 100 == 0:
                    self.assertEqual(result.copy_to_host(), bytes([int(result.user) % 256]) * 4096)
            self.assertEqual(seen, set(range(total)))
            peer.close()
            self.assertEqual(peer.process.wait(PATIENCE), 0)
            del peer, result
            eventually(lambda: not self.parent._loans and self.parent.stats().chunks == 0, "the loans and the arena are over")
            collect()
            ours = (gpuloan._Hold, gpuloan.DeviceArray, gpuloan._LoanBase, gpuloan.Peer)
            objects = gc.get_objects()
            mine = sum(isinstance(one, ours) for one in objects)
            counts.append((descriptors(), len(gpuloan._kept), len(gpuloan._exports), mine, len(objects)))
            del objects
        self.assertEqual(counts[0][1:4], counts[1][1:4])
        self.assertLessEqual(counts[1][0], counts[0][0])
        self.assertLess(counts[1][4] - counts[0][4], 100)  # of 900 more results


class WithoutDevice(Case):
    options = {"device": -1}

    def test_host_memory(self):
        peer = self.spawn("on_host")
        result = self.parent.next_result(PATIENCE)
        self.assertEqual(bytes(result.host), bytes(range(12)))
        self.assertEqual((result.__dlpack_device__(), result.copy_to_host()), ((1, 0), bytes(range(12))))
        result.host[0] = 99
        self.assertEqual(result.copy_to_host()[0], 99)
        self.assertEqual(result.copy_from(bytes(range(12, 24))), 12)
        with self.assertRaises(AttributeError):
            result.__cuda_array_interface__
        loan = peer.lend(result)  # in place, as all memory of this parent's
        self.assertEqual(str(loan.report().rung), "host")
        loan.wait(PATIENCE)
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), bytes(255 - value for value in range(12, 24)))
        with gpuloan.Exporter(device=-1) as other:
            with self.refused(gpuloan.CallError, "host memory of another parent's", "empty()"):
                other.spawn(worker("mirror"), timeout=PATIENCE).lend(result)
        view = result.host
        del result
        collect()
        self.assertEqual((bytes(view), self.parent.stats().live_bytes), (bytes(range(12, 24)), 12))  # the view keeps the memory
        del view
        eventually(lambda: self.parent.stats().live_bytes == 0, "the memory went with the view")


class Connections(Case):
    def test_refusals_are_told_to_whom_they_are_about(self):
        """Of workers that start at once, also where others may connect to a path: a failure is its own worker's alone."""
        rubbish = ("import os, socket, time\n"
                   "socket.socket(fileno=int(os.environ['GPULOAN_FD'])).send(b'rubbish' * 20)\n"
                   "time.sleep(60)\n")
        later = [sys.executable, "-c", "import os, sys; os.read(0, 1); os.execv(sys.executable, sys.argv[1:])", *worker("mirror")]
        with tempfile.TemporaryDirectory() as folder:
            for listens in (False, True):
                if listens:
                    self.parent.listen(folder + "/socket")
                made = []
                gate, go = os.pipe()
                healthy = threading.Thread(target=lambda: made.append(self.parent.spawn(later, timeout=PATIENCE, stdin=gate)))
                healthy.start()
                eventually(lambda: self.parent._attaches, "the healthy worker was started")
                with self.subTest(listens=listens):
                    for code, kind, words, timeout in (("raise SystemExit(3)", gpuloan.PeerError, "ended with exit code 3", PATIENCE),
                                                       (rubbish, gpuloan.PeerError, "record", PATIENCE),
                                                       ("input()", gpuloan.Timeout, "gpuloan.worker()", 0.3)):
                        with self.refused(kind, words):
                            self.parent.spawn([sys.executable, "-c", code], timeout=timeout, stdin=subprocess.PIPE)
                    with self.refused(gpuloan.Timeout):
                        self.parent.next_peer(0.05)
                os.write(go, b"x")
                healthy.join(PATIENCE)
                os.close(gate)
                os.close(go)
                self.assertEqual([peer.lost for peer in made], [None])
                self.assertEqual(self.parent._attaches, [])

    def test_attach_of_what_is_no_socketpair(self):
        read, write = os.pipe()
        self.addCleanup(os.close, write)
        for end, words in ((read, "SEQPACKET"), (9999, "descriptor 9999")):
            with self.refused(gpuloan.CallError, words):
                self.parent.attach(end, timeout=PATIENCE)
        os.close(read)  # it is still this test's

    def test_listen_that_fails(self):
        with self.refused(gpuloan.Error, "ENOENT"):
            self.parent.listen("/nowhere/socket")
        with self.refused(gpuloan.PeerError, "there is no worker"):
            self.parent.next_result(PATIENCE)

    def test_many_descriptors(self):
        """More than select() can take; a loop is the reader."""
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
            self.skipTest("this process may not have so many")
        result = python("import asyncio, gpuloan, os, resource, threading, time\nfrom support import worker\n"
                        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
                        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
                        "with gpuloan.Exporter() as parent:\n"
                        " peer, idle = parent.spawn(worker('mirror')), parent.spawn(worker('mirror'))\n"
                        " loop = asyncio.new_event_loop()\n"
                        " task = loop.create_task(parent.result(idle))\n"
                        " thread = threading.Thread(target=loop.run_forever); thread.start()\n"
                        " while parent._reader is None: time.sleep(0.001)\n"
                        " peer.lend(peer.empty(4, 'uint8'))\n"
                        " print(parent.next_result(60, peer).nbytes)\n"
                        " loop.call_soon_threadsafe(task.cancel)\n"
                        " loop.call_soon_threadsafe(loop.stop); thread.join(); loop.close()\n")
        self.assertEqual((result.stdout, result.returncode), ("4\n", 0), result.stderr)

    def test_path_and_key(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "socket")
            self.parent.listen(path)
            code = ("import gpuloan\n"
                    "with gpuloan.connect(sys.argv[1], sys.stdin.read(), timeout=30) as peer:\n"
                    "    with peer.request((), 'uint8') as out: out.copy_from(b'k')\n"
                    "    peer.next_loan(30)\n")
            key = self.parent.invite("account")
            self.assertEqual((len(key), key.strip("0123456789abcdef")), (64, ""))
            head = f"import sys; sys.path.insert(0, {str(pathlib.Path(gpuloan.__file__).parent)!r})\n"
            child = subprocess.Popen([sys.executable, "-W", "error", "-c", head + code, path], stdin=subprocess.PIPE, text=True)
            child.stdin.write(key)
            child.stdin.close()
            peer = self.parent.next_peer(PATIENCE)
            self.assertEqual((peer.pid, peer.info().account, peer.process), (child.pid, "account", None))
            self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"k")
            peer.close()
            self.assertEqual(child.wait(PATIENCE), 0)
            # A key is good for one start; the refusal is told to both sides.
            again = python("import gpuloan\ntry: gpuloan.connect(sys.argv[1] if len(sys.argv) > 1 else %r, %r)\n"
                           "except gpuloan.PeerError as error: print(error.name)" % (path, key))
            self.assertEqual(again.stdout, "GPULOAN_ERR_KEY\n", again.stderr)
            with self.refused(gpuloan.PeerError):
                self.parent.next_peer(PATIENCE)

    def test_attach(self):
        for early in (False, True):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if early:
                self.assertIsNone(self.parent.attach(ours, timeout=0))
            with theirs:
                child = subprocess.Popen(worker("many", "1"), pass_fds=(theirs.fileno(),),
                                         env=dict(os.environ, GPULOAN_FD=str(theirs.fileno())))
            peer = self.parent.next_peer(PATIENCE) if early else self.parent.attach(ours, timeout=PATIENCE)
            self.assertEqual(ours.fileno(), -1)
            self.parent.next_result(PATIENCE, peer)
            peer.close()
            self.assertEqual(child.wait(PATIENCE), 0)

    def test_workers_that_never_connect(self):
        before = descriptors()
        with self.refused(gpuloan.PeerError, "ended with exit code 3"):
            self.parent.spawn([sys.executable, "-c", "raise SystemExit(3)"], timeout=PATIENCE)
        with self.refused(gpuloan.Timeout, "gpuloan.worker()"):
            self.parent.spawn([sys.executable, "-c", "input()"], timeout=0.3, stdin=subprocess.PIPE)
        eventually(lambda: descriptors() <= before + 1, "their descriptors are closed")

    def test_spawn_through_a_shell(self):
        command = " ".join(worker("mirror"))
        peer = self.parent.spawn(["sh", "-c", command + "; true"], timeout=PATIENCE)
        self.assertNotEqual(peer.pid, peer.process.pid)

    def test_worker_without_a_parent(self):
        for value, words in ((None, "not started by spawn()"), ("987", "not open")):
            env = {key: text for key, text in os.environ.items() if key != "GPULOAN_FD"}
            if value:
                env["GPULOAN_FD"] = value
            result = python("import gpuloan\ntry: gpuloan.worker()\nexcept gpuloan.PeerError as error: print(error)", env=env)
            self.assertIn(words, result.stdout, result.stderr)

    def test_infos(self):
        peer = self.spawn("mirror")
        self.assertEqual((peer.pid, peer.info().lost), (peer.process.pid, 0))
        self.assertEqual(self.parent.stats().peers, 1)
        self.assertEqual(gpuloan.driver_info().simulated, 1)
        self.assertEqual(len(gpuloan.device_info(0).uuid), 16)
        with self.refused(gpuloan.DeviceError) as caught:
            gpuloan.device_info(99)
        self.assertEqual(caught.error.name, "GPULOAN_ERR_NO_DEVICE")


class Asyncio(Case):
    def test_await(self):
        peer = self.spawn("mirror")
        other = self.spawn("failing_loan")

        async def main():
            loans = [peer.lend(fakes.Torch("uint8", (1,), bytes([n]))) for n in range(5)]
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.ensure_future(tick())
            values = [(await asyncio.wait_for(self.parent.result(), PATIENCE)).copy_to_host()[0] for _ in loans]
            self.assertIs(self.parent._reader, None)  # the thread takes events again
            await asyncio.wait_for(asyncio.gather(*loans), PATIENCE)
            with self.refused(gpuloan.LoanError, "cannot read this"):
                await asyncio.wait_for(other.lend(fakes.Torch("uint8", (1,), b"x")), PATIENCE)
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(self.parent.result(), 0.05)
            ticking.cancel()
            self.assertGreater(ticks, 10)  # the loop ran meanwhile
            return values

        for _ in range(2):  # two loops, one after the other
            self.assertEqual(sorted(asyncio.run(main())), [250 + n + 1 for n in range(5)])
        peer.lend(fakes.Torch("uint8", (1,), b"\x00"))  # and the thread after them
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"\xff")
        self.assertEqual((self.parent._futures, self.parent._loops), ([], {}))

    def test_interrupt_in_the_grant_function(self):
        """It is Ctrl-C's: the loop ends of it, and the worker is denied."""
        peer = self.spawn("mirror", stderr=subprocess.PIPE)
        self.parent.grant = mock.Mock(side_effect=KeyboardInterrupt)

        async def main():
            result = asyncio.ensure_future(self.parent.result(peer))
            await asyncio.sleep(0)
            peer.lend(fakes.Torch("uint8", (1,), b"x"))
            await asyncio.wait_for(result, PATIENCE)

        with self.assertRaises(KeyboardInterrupt):
            asyncio.run(main())
        self.assertIn(b"gpuloan.LoanError: KeyboardInterrupt", peer.process.communicate(timeout=PATIENCE)[1])

    def test_loop_that_stopped_with_something_awaited(self):
        """The thread takes events again: the worker's request is granted while the parent waits."""
        peer = self.spawn("mirror")
        for close in (False, True):
            loop = asyncio.new_event_loop()
            task = loop.create_task(self.parent.result(peer))
            loop.run_until_complete(asyncio.sleep(0.05))
            if close:
                task._log_destroy_pending = False
                loop.close()
            for _ in range(2):
                peer.lend(fakes.Torch("uint8", (1,), b"x")).wait(PATIENCE)
                self.parent.next_result(PATIENCE)
            if not close:
                with contextlib.suppress(asyncio.CancelledError):
                    task.cancel()
                    loop.run_until_complete(task)
                loop.close()

    def test_failure_is_told_whoever_is_cancelled(self):
        self.spawn("hold")  # which could still bring a result
        peer = self.spawn("loses_its_connection")
        told = []

        async def main():
            while not told:
                try:
                    await asyncio.wait_for(self.parent.result(), 0.02)
                except asyncio.TimeoutError:
                    pass
                except gpuloan.PeerError as error:
                    told.append(error.user)
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(self.parent.result(), 0.05)

        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        self.assertEqual(told, [b"job 1"])
        peer.process.kill()

    def test_the_loop_takes_the_events(self):
        """While something is awaited, events come through the context's descriptor on the loop's own thread."""
        threads = []
        self.parent.grant = lambda request: threads.append(threading.current_thread())
        peer = self.spawn("many", "200")

        async def main():
            for _ in range(200):
                await self.parent.result(peer)

        asyncio.run(asyncio.wait_for(main(), PATIENCE))
        self.assertIn(threading.main_thread(), threads)


if __name__ == "__main__":
    main()
