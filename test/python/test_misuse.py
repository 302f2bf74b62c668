# SPDX-License-Identifier: MIT
"""What newcomers do wrong or wait for, and what they are told: forgotten done(), denied requests, workers that die, numbers that are
none, simulated memory in a framework, Ctrl-C."""
import os
import socket
import threading
from unittest import mock

from support import Case, PATIENCE, main
import fakes
import gpuloan


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


class Numbers(Case):
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


if __name__ == "__main__":
    main()
