# SPDX-License-Identifier: MIT
"""What people use today, for peers_side.py: torch.multiprocessing, shared memory and cuda.core. A module of its own, which their worker
processes import."""
import gc
import multiprocessing
import queue
import time

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 20     # seconds that one handover may take
ENDLESS = 255  # as the value to fill with: the worker writes until it is killed


class Died(Exception):
    pass


def torch_child(method, inbox, outbox):
    import torch
    import torch.multiprocessing  # noqa: F401  registers how tensors are sent
    receive, send = (inbox.get, outbox.put) if method == "queue" else (inbox.recv, inbox.send)
    while True:
        message = receive()
        if message is None:
            return
        what, value = message
        tensor = torch.empty(what, dtype=torch.uint8, device="cuda") if method == "shm" else what
        if value == ENDLESS:
            while True:
                for _ in range(16):
                    tensor.fill_(1)
                torch.cuda.synchronize()
        tensor.fill_(value)
        torch.cuda.synchronize()
        if method == "shm":
            send(tensor.cpu().share_memory_())
        else:
            del tensor, what, message
            send(value)


class TorchMethod:
    """queue, pipe, shm."""

    def __init__(self, method, driver):
        import torch
        import torch.multiprocessing as tensors
        self.torch, self.method, self.driver, self.value, self.tensor = torch, method, driver, 0, None
        torch.zeros(1, device="cuda")
        context = tensors.get_context("spawn")
        if method == "queue":
            self.inbox, self.outbox = context.Queue(), context.Queue()
            self.process = context.Process(target=torch_child, args=(method, self.inbox, self.outbox), daemon=True)
            self.process.start()
        else:
            self.inbox, theirs = context.Pipe()
            self.process = context.Process(target=torch_child, args=(method, theirs, None), daemon=True)
            self.process.start()
            theirs.close()

    def send(self, message):
        (self.inbox.put if self.method == "queue" else self.inbox.send)(message)

    def receive(self):
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            try:
                if self.method == "queue":
                    return self.outbox.get(timeout=2)
                if self.inbox.poll(2):
                    return self.inbox.recv()
            except queue.Empty:
                pass
            except EOFError:
                raise Died("the pipe ended") from None
            if self.process.exitcode is not None:
                raise Died(f"the worker ended with {self.process.exitcode}")
        raise TimeoutError(f"no answer within {LIMIT} s")

    def hand_over(self, size, value):
        if self.method == "shm":
            self.send((size, value))
        else:
            self.tensor = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
            self.send((self.tensor, value))

    def round(self, size):
        self.value = (self.value + 1) % 128
        self.hand_over(size, self.value)
        answer = self.receive()
        if self.method == "shm":
            self.tensor = answer.cuda()
            self.torch.cuda.synchronize()

    def work(self):
        """What has to be called for the method to do what is due."""

    def check(self, size):
        return (int(self.tensor[0]), int(self.tensor[size - 1])) == (self.value, self.value)

    def endless(self, size):
        self.hand_over(size, ENDLESS)

    def told(self):
        """What tells the parent that the worker died, without asking for it; None: nothing does."""
        try:
            if self.method == "queue":
                self.outbox.get(timeout=5)
            elif self.inbox.poll(5):
                self.inbox.recv()
        except queue.Empty:
            return None
        except (EOFError, ConnectionResetError) as error:
            return type(error).__name__
        return None

    def drop(self):
        self.tensor = None
        gc.collect()
        self.torch.cuda.ipc_collect()
        self.torch.cuda.empty_cache()

    def end(self):
        self.drop()
        self.send(None)
        self.process.join(LIMIT)


def core_device():
    try:
        import cuda.core as core
        core.DeviceMemoryResource
    except (ImportError, AttributeError):
        import cuda.core.experimental as core
    device = core.Device(0)
    device.set_current()
    return core, device, device.create_stream()


def core_child(inbox, outbox, resource):
    _, _, stream = core_device()
    while True:
        message = inbox.get()
        if message is None:
            return
        buffer, value = message
        while value == ENDLESS:
            buffer.fill(1, stream=stream)
            stream.sync()
        buffer.fill(value, stream=stream)
        stream.sync()
        buffer.close()
        outbox.put(value)


class CoreMethod(TorchMethod):
    method = "queue"

    def __init__(self, method, driver):
        core, device, self.stream = core_device()
        self.driver, self.value, self.tensor = driver, 0, None
        self.resource = core.DeviceMemoryResource(device, core.DeviceMemoryResourceOptions(ipc_enabled=True, max_size=16 * GIB))
        multiprocessing.set_start_method("spawn", force=True)  # cuda.core looks at this one
        self.inbox, self.outbox = multiprocessing.Queue(), multiprocessing.Queue()
        self.process = multiprocessing.Process(target=core_child, args=(self.inbox, self.outbox, self.resource), daemon=True)
        self.process.start()

    def hand_over(self, size, value):
        if self.tensor is not None:
            self.tensor.close()
        self.tensor = self.resource.allocate(size, stream=self.stream)
        self.stream.sync()
        self.send((self.tensor, value))

    def check(self, size):
        return self.driver.ends(int(self.tensor.handle), size) == (self.value, self.value)

    def drop(self):
        if self.tensor is not None:
            self.tensor.close()
            self.tensor = None
        gc.collect()
        self.stream.sync()
