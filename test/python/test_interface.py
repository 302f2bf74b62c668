# SPDX-License-Identifier: MIT
"""The declarations in gpuloan.py against the header, and the file as such: its Python, its imports, finding the library.

GPULOAN_TEST_LAYOUTS names the program that layouts_c.py writes."""
import ast
import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

from support import MODULE, main, python
import gpuloan


class Declarations(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        program = os.environ.get("GPULOAN_TEST_LAYOUTS")
        if not program:
            raise unittest.SkipTest("GPULOAN_TEST_LAYOUTS is not set: run by 'meson test --suite python'")
        cls.structs, cls.enums = {}, {}
        for line in subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines():
            what, name, *rest = line.split()
            if what == "struct":
                cls.structs[name] = (int(rest[0]), [])
            elif what == "field":
                cls.structs[name][1].append((rest[0], int(rest[1]), int(rest[2])))
            else:
                cls.enums[name] = int(rest[0])

    def compare(self, declared, name, renamed=None):
        size, fields = self.structs[name]
        mine = []
        for field in declared._fields_:
            value = getattr(declared, field[0])
            mine.append((field[0], value.offset, value.size))
        renamed = renamed or {}
        self.assertEqual(mine, [(renamed.get(field, field), *rest) for field, *rest in fields])
        self.assertEqual(ctypes.sizeof(declared), size)

    def test_structs(self):
        names = {gpuloan._ContextOptions: "context_options", gpuloan._EventStruct: "event", gpuloan._Stats: "stats", gpuloan._Key: "key",
                 gpuloan._PeerInfo: "peer_info", gpuloan._RegionOptions: "region_options",
                 gpuloan._LendOptions: "lend_options", gpuloan._RequestInfo: "request_info",
                 gpuloan._RequestOptions: "request_options", gpuloan._View: "view", gpuloan._LoanReport: "loan_report",
                 gpuloan._DeviceInfo: "device_info", gpuloan._DriverInfo: "driver_info",
                 gpuloan._DLPython: "dlpack_python"}
        self.assertEqual(set(gpuloan._Sized.__subclasses__()) - set(names), set())  # none is left out
        for declared, name in names.items():
            with self.subTest(name):
                self.compare(declared, "gpuloan_" + name)

    def test_dlpack(self):
        inner = {"device": ("device_type", "device_id"), "dtype": ("code", "bits", "lanes")}
        flat = {f"{struct}.{name}": name for struct, names in inner.items() for name in names}
        self.compare(gpuloan._DLTensor, "DLTensor", flat)
        self.compare(gpuloan._DLManaged, "DLManagedTensor", {"dl_tensor": "tensor"})
        self.compare(gpuloan._DLManagedVersioned, "DLManagedTensorVersioned",
                     {"dl_tensor": "tensor", "version.major": "major", "version.minor": "minor"})

    def test_enums(self):
        for kind, prefix in ((gpuloan.Access, "ACCESS"), (gpuloan.Memory, "MEMORY"), (gpuloan.Rung, "RUNG"), (gpuloan.Gate, "GATE"),
                             (gpuloan.Engine, "ENGINE"), (gpuloan.Policy, "POLICY"), (gpuloan.Canary, "CANARY"),
                             (gpuloan.MemoryState, "MEMORY"), (gpuloan.Role, "ROLE"), (gpuloan._Event, "EVENT")):
            for one in kind:
                with self.subTest(one=one):
                    self.assertEqual(self.enums[f"GPULOAN_{prefix}_{one.name}"], int(one))
            if kind not in (gpuloan.Memory, gpuloan.MemoryState):  # which share their prefix
                theirs = {name for name in self.enums if name.startswith(f"GPULOAN_{prefix}_")}
                self.assertEqual(theirs, {f"GPULOAN_{prefix}_{one.name}" for one in kind})
        for number, name in enumerate(gpuloan._STEPS):
            self.assertEqual(self.enums["GPULOAN_STEP_" + name], number)
        self.assertEqual(self.enums["GPULOAN_STEP_COUNT"], len(gpuloan._STEPS))
        self.assertEqual((self.enums["GPULOAN_CONTEXT_NO_DEVICE"], self.enums["GPULOAN_CONTEXT_DEVICE"]),
                         (gpuloan._CONTEXT_NO_DEVICE, gpuloan._CONTEXT_DEVICE))

    def test_statuses_and_their_classes(self):
        statuses = {name: number for name, number in self.enums.items() if name.startswith("GPULOAN_ERR_")}
        self.assertGreater(len(statuses), 30)
        for name, number in statuses.items():
            error = gpuloan._error(number, "text")
            self.assertEqual((error.name, error.status, str(error)), (name, number, "text"))
            group = gpuloan.CallError if number > -20 else gpuloan.LoanError if number > -40 else gpuloan.PeerError if number > -60 else (
                gpuloan.DeviceError if number > -80 else gpuloan.ProcessError)
            self.assertIsInstance(error, group)
        for name in ("INVALID", "TIMEOUT", "BUSY", "STATE", "UNSUPPORTED", "PEER_LOST", "CONNECT", "FORKED", "DENIED", "RETURNED"):
            self.assertEqual(getattr(gpuloan, "_" + name), statuses["GPULOAN_ERR_" + name])
        self.assertIsInstance(gpuloan._error(-2, ""), TimeoutError)


class File(unittest.TestCase):
    def test_python_39(self):
        tree = ast.parse(MODULE.read_text(), feature_version=(3, 9))
        imported = set()
        for node in tree.body:  # the module level
            imported |= {name.name for name in node.names} if isinstance(node, ast.Import) else set()
            imported |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        self.assertIn("ctypes", imported)
        self.assertEqual(imported - set(getattr(sys, "stdlib_module_names", imported)), set())  # from 3.10 on

    def test_public_things_have_docstrings(self):
        missing = []
        for node in ast.parse(MODULE.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                inside = [one for one in node.body if isinstance(one, functions) and not one.name.startswith("_")]
                enum = isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "_Named" for base in node.bases)
                missing += [one.name for one in [node, *inside] if not ast.get_docstring(one) and not enum]
        self.assertEqual(set(missing), {"dtype", "itemsize", "nbytes", "pointer", "device", "pid"})  # said in their class' docstring


class Library(unittest.TestCase):
    def load(self, path, folder=None):
        env = {key: value for key, value in os.environ.items() if key != "GPULOAN_LIBRARY"}
        if path:
            env["GPULOAN_LIBRARY"] = str(path)
        code = f"import sys; sys.path.insert(0, {str(folder or MODULE.parent)!r}); import gpuloan; print(gpuloan.version())"
        return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, env=env)

    def test_beside_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(MODULE, folder)
            os.symlink(os.path.realpath(os.environ["GPULOAN_LIBRARY"]), pathlib.Path(folder) / "libgpuloan.so.0")
            result = self.load(None, folder)
            self.assertEqual((result.stdout, result.stderr), (gpuloan.version() + "\n", ""))

    def test_named_and_missing(self):
        result = self.load("/nowhere/libgpuloan.so.0")
        self.assertIn("gpuloan: GPULOAN_LIBRARY names a library that cannot be loaded: /nowhere/libgpuloan.so.0", result.stderr)
        result = self.load(os.environ["GPULOAN_SIM_LIBRARY"])
        self.assertIn("is not a gpuloan library", result.stderr)

    def test_other_version(self):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            self.skipTest("no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source, library = pathlib.Path(folder) / "other.c", pathlib.Path(folder) / "libgpuloan.so.0"
            for version in ("0.2.0", "1.1.0", "0.10.3"):
                source.write_text(f'const char *gpuloan_version_text(void) {{ return "{version}"; }}\n')
                subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
                result = self.load(library)
                self.assertIn(f"this module is for version 0.1 of the library, and {library} is version {version}", result.stderr)

    def test_torch_pool_needs_the_allocator_and_a_pool(self):
        old = types.SimpleNamespace(gpuloan_version_text=lambda: b"0.1.0")
        with mock.patch.object(gpuloan, "_lib", old), self.assertRaisesRegex(gpuloan.CallError, "no allocator for PyTorch"):
            with gpuloan.torch_pool():
                pass
        old.gpuloan_torch_malloc = old.gpuloan_torch_free = None
        torch = types.ModuleType("torch")
        torch.cuda, torch.__version__ = types.SimpleNamespace(), "2.4.1"
        with mock.patch.object(gpuloan, "_lib", old), mock.patch.dict(sys.modules, torch=torch):
            with self.assertRaisesRegex(gpuloan.CallError, r"PyTorch 2.4.1 has no torch.cuda.MemPool.*expandable_segments"):
                with gpuloan.torch_pool():
                    pass

    def test_torch_pool_is_kept_until_it_is_released(self):
        """With a stand-in for PyTorch: what it is called with. The allocator is kept: blocks of a pool that is gone go back through it."""
        calls = []
        torch = types.ModuleType("torch")

        def called(name, result=None):
            return lambda *arguments, **options: (calls.append((name, arguments, options)), result)[1]

        allocator = types.SimpleNamespace(allocator=called("allocator", "raw"))
        torch.cuda = types.SimpleNamespace(
            current_device=lambda: 3, MemPool=called("MemPool", "pool"), device=lambda ordinal: contextlib.nullcontext(),
            empty_cache=called("empty_cache"),
            use_mem_pool=lambda pool, device: (calls.append(("use", (pool, device), {})), contextlib.nullcontext())[1],
            memory=types.SimpleNamespace(CUDAPluggableAllocator=called("CUDAPluggableAllocator", allocator)))
        library = types.SimpleNamespace(gpuloan_torch_malloc=None, gpuloan_torch_free=None)
        with mock.patch.object(gpuloan, "_lib", library), mock.patch.dict(sys.modules, torch=torch), \
                mock.patch.dict(gpuloan._torch_pools), mock.patch.object(gpuloan, "_torch_allocator", None):
            gpuloan.torch_pool_release()
            for release in (False, True, False):
                with gpuloan.torch_pool() as pool:
                    self.assertEqual(pool, "pool")
                if release:
                    gpuloan.torch_pool_release()
                    self.assertEqual(gpuloan._torch_pools, {})
        path = gpuloan._library_path()
        names = ("gpuloan_torch_malloc", "gpuloan_torch_free")
        self.assertEqual(calls, [("CUDAPluggableAllocator", (path, *names), {}), ("allocator", (), {}), ("MemPool", ("raw",), {}),
                                 ("use", ("pool", 3), {}), ("use", ("pool", 3), {}), ("empty_cache", (), {}),
                                 ("allocator", (), {}), ("MemPool", ("raw",), {}), ("use", ("pool", 3), {})])

    def test_library_path(self):
        self.assertEqual(os.path.realpath(gpuloan._library_path()), os.path.realpath(os.environ["GPULOAN_LIBRARY"]))

    def test_pool_install(self):
        result = python("import gpuloan\ngpuloan.pool_install(0)\ntry: gpuloan.pool_install(0)\n"
                        "except gpuloan.CallError as error: print(error.name)\ngpuloan.pool_uninstall(0)")
        self.assertEqual((result.stdout, result.returncode), ("GPULOAN_ERR_STATE\n", 0), result.stderr)


class SimulatedState(unittest.TestCase):
    """What is said when GPULOAN_SIM_STATE names a file that cannot be used: which, why, and what to do."""

    def test_files_that_cannot_be_used(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for file, mode, content in (("shared", 0o644, b""), ("foreign", 0o600, b"somebody's notes")):
                (folder / file).write_bytes(content)
                (folder / file).chmod(mode)
            (folder / "link").symlink_to("shared")
            for file, words in (("shared", "mode 0600"), ("foreign", "did not make it, or it is damaged"), ("link", "symbolic link"),
                                (".", "a folder"), ("none/state", "folder does not exist")):
                with self.subTest(file):
                    result = python("import gpuloan\ntry: gpuloan.Exporter()\nexcept gpuloan.DeviceError as error: print(error)",
                                    env=dict(os.environ, GPULOAN_SIM_STATE=str(folder / file)))
                    self.assertIn(words, result.stderr)
                    self.assertIn(f"GPULOAN_SIM_STATE, the state file {folder / file}: ", result.stderr)
                    self.assertIn("the file that GPULOAN_SIM_STATE names", result.stdout)
                    self.assertNotIn("/dev/nvidia", result.stdout)
            self.assertEqual((folder / "foreign").read_bytes(), b"somebody's notes")


if __name__ == "__main__":
    main()
