# SPDX-License-Identifier: MIT
"""The workers of the tests: python3 jobs.py NAME [ARGUMENT]... The framework-free half of every test."""
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "lib", "python"), HERE]
sys.dont_write_bytecode = True

import gpuloan  # noqa: E402

kept = []  # until the program ends

flip = bytes(255 - value for value in range(256))


def describe(array):
    return {"dtype": array.dtype, "shape": array.shape, "strides": array.strides, "nbytes": array.nbytes,
            "host": array.host is not None, "read_only": array._read_only, "pointer": bool(array.pointer)}


def mirror(peer):
    """Answers each loan with its elements inverted, and what it looked like."""
    for loan in peer:
        with loan as x:
            seen = dict(describe(x), user=loan.user.decode())
            with peer.request(x.shape, x.dtype, user=json.dumps(seen).encode()) as out:
                out.copy_from(x.copy_to_host().translate(flip))


def invert(peer):
    """Inverts each write loan in place, whatever its strides."""
    for loan in peer:
        with loan as x:
            size = x._as_source().covered
            buffer = ctypes.create_string_buffer(size)
            x._context.driver().copy("DtoH", ctypes.addressof(buffer), x.pointer, size, 1)
            flipped = ctypes.create_string_buffer(buffer.raw.translate(flip), size)
            x._context.driver().copy("HtoD", x.pointer, ctypes.addressof(flipped), size, 1)


def turns(peer):
    """Adds one to each byte of each turn of one loan."""
    loan = peer.next_loan()
    while True:
        x = loan.next_turn()
        if x is None:
            return
        x.copy_from(bytes(value + 1 for value in x.copy_to_host()))
        loan.done()


def hold(peer):
    """Holds its loan until it is killed, or until the parent is gone."""
    held = [peer.next_loan()]
    if held[0] is None:
        return
    held[0].tensor
    with contextlib.suppress(gpuloan.PeerError):
        peer.request(3, "uint8", user=b"held").tensor.copy_from(b"now")  # dropped: returned
        peer.next_loan()


def leaves_child(peer):
    """Ends with its loan, and leaves a forked child that still maps the memory until its process group is killed."""
    kept.append(peer.next_loan())
    kept[0].tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # nobody else would end it
        signal.pause()
    os._exit(0)


def die(peer, bytes_=1 << 20):
    """Dies in the middle of writing a result."""
    out = peer.request(bytes_, "uint8", user=b"mid-write")
    out.copy_from(b"x" * bytes_)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(peer):
    with peer.request((2, 2), "float32", user=b"will fail"):
        raise ValueError("the model has no such layer")


def failing_loan(peer):
    for loan in peer:
        loan.tensor
        loan.fail("cannot read this")


def raises(peer):
    """An exception in a job ends the program."""
    for loan in peer:
        with loan:
            raise RuntimeError("the lamp is out")


def forgets(peer):
    """Acquires its loans and says nothing of them."""
    for loan in peer:
        loan.tensor
        del loan


def forgets_result(peer, how):
    """Asks for results and never says done of them; then goes on, or ends."""
    def job():
        out = peer.request(4, "uint8", user=how.encode())
        out.copy_from(b"half")
        if how == "cycle":
            try:
                raise ValueError("kept by its own traceback's frame")
            except ValueError as error:
                kept_here = error  # noqa: F841
        if how == "array":
            return out.tensor
        if how == "exit":
            kept.append(out)

    array = job()
    del array
    if how != "exit":
        peer.next_loan()


def ends_holding(peer):
    kept.append(peer.next_loan())
    kept[0].tensor


def refused_memory(peer, bytes_):
    """Asks for more than there is, and tells what was said to it by a result."""
    for loan in peer:
        try:
            with loan:
                peer.request(int(bytes_), "uint8", user=b"too much")
        except gpuloan.LoanError as error:
            text = f"{error.name}: {error}"
        with peer.request(len(text), "uint8", user=b"text") as out:
            out.copy_from(text.encode())


def fails_with_its_request(peer):
    for loan in peer:
        with contextlib.suppress(ValueError), loan, peer.request(4, "uint8", user=b"asked"):
            raise ValueError("no such layer")


def loses_its_connection(peer):
    """With a result under way; the process goes on."""
    kept.append(peer.request(4, "uint8", user=b"job 1"))
    peer._context.close()
    signal.alarm(60)
    signal.pause()


def deaf(peer):
    """Neither hears Ctrl-C nor sees that the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(100)


def exits(peer, code):
    kept.append(peer.next_loan())
    kept[0].tensor
    os._exit(int(code))


def many(peer, count="1000", bytes_="4096"):
    for number in range(int(count)):
        with peer.request(int(bytes_), "uint8", user=str(number).encode()) as out:
            out.copy_from(bytes([number % 256]) * int(bytes_))
    peer.next_loan()


def owner(peer):
    """A C program's view of it: what holds the loan here, told by results."""
    import fakes

    def tell(text):
        with peer.request(len(text), "uint8", user=b"tell") as out:
            out.copy_from(text.encode())

    loan = peer.next_loan()
    consumer = fakes.Consumer(loan.tensor.__dlpack__())
    del loan
    tell("exported")
    assert peer.next_loan().user == b"go on"
    consumer.release()
    tell("released")
    peer.next_loan()


def twice(peer):
    """What is refused after done."""
    loan = peer.next_loan()
    x = loan.tensor
    capsule = x.__dlpack__()
    loan.done()
    said = []
    for call in (loan.done, lambda: x.pointer, lambda: x.__dlpack__(), lambda: x.__cuda_array_interface__, x.copy_to_host,
                 lambda: loan.tensor):
        try:
            said.append(repr(call()))
        except gpuloan.Error as error:
            said.append(error.name)
    del capsule
    with peer.request(0, "uint8", user=json.dumps(said).encode()):
        pass
    peer.next_loan()


def read_only(peer):
    """copy_from into a read loan is refused; the answer is a result."""
    with peer.next_loan() as x:
        try:
            x.copy_from(b"xyz")
        except gpuloan.CallError as error:
            text = str(error)
        flags = fakes_flags(x)
    with peer.request(0, "uint8", user=json.dumps([text, flags]).encode()):
        pass
    peer.next_loan()


def fakes_flags(x):
    import fakes

    consumer = fakes.Consumer(x.__dlpack__(max_version=(1, 0)))
    flags = consumer.managed.flags
    consumer.release()
    return [flags, x.__cuda_array_interface__["data"][1]]


def denied(peer):
    """Tells by a result what the parent said to a request."""
    try:
        peer.request(16, "uint8", user=b"deny me")
        text = "granted"
    except gpuloan.LoanError as error:
        text = f"{error.name}: {error}"
    with peer.request(len(text), "uint8", user=b"text") as out:
        out.copy_from(text.encode())
    peer.next_loan()


def on_host(peer):
    with peer.request((2, 3), "int16", memory="host") as out:
        out.host[:] = bytes(range(12))
    mirror(peer)


def linger(peer):
    """A worker thread is in a wait when the program ends."""
    threading.Thread(target=lambda: peer.next_loan(), daemon=True).start()
    kept.extend([peer.next_loan(), peer.request(64, "uint8")])
    kept[0].tensor


if __name__ == "__main__":
    job, arguments = globals()[sys.argv[1]], sys.argv[2:]
    if job is fail:
        with gpuloan.worker() as peer:
            try:
                fail(peer)
            except ValueError:
                pass
            peer.next_loan()
    elif job is linger:
        linger(gpuloan.worker())
    else:
        try:
            with gpuloan.worker() as peer:
                job(peer, *arguments)
        except gpuloan.PeerError as error:
            if "closed the connection" not in str(error):  # in order: the test is over
                raise
