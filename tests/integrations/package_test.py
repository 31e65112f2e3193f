#!/usr/bin/python3
"""Tests the Python package: imports, the doctor, options of hooks, `pip install .`, wheels and zip archives."""
from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import pathlib
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import unittest
import unittest.mock
import zipfile
from typing import Any

import torch

import gradwire
import gradwire.torch
from gradwire import _buckets, _native, _process_group
from gradwire._port import reserve_port
from thread_ranks import run_ranks

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"


class Hooks(unittest.TestCase):
    def test_state_names_omit_wrappers(self) -> None:
        for wrapped in ("module.layer.weight", "_orig_mod.layer.weight", "module._orig_mod.layer.weight",
                        "_orig_mod.module.layer.weight", "layer._orig_mod.weight"):
            self.assertEqual(_buckets.plain_name(wrapped), "layer.weight")

    def test_a_pickled_hook_keeps_its_options(self) -> None:
        model = torch.nn.Linear(2, 3)
        hook = gradwire.torch.Hook("bf16,schedule=ring", model=torch.nn.Linear(2, 3), timeout_s=7, seed=5)
        copy = pickle.loads(pickle.dumps(hook))
        self.assertEqual((copy.spec, copy._timeout_s, copy._seed), ("bf16,schedule=ring", 7, 5))
        copy.name_parameters(model)
        self.assertEqual(copy._names.of(list(model.parameters())), ("weight", "bias"))
        hook.close()
        copy.close()

    def test_ports_are_reserved_from_the_range_in_the_environment(self) -> None:
        with contextlib.ExitStack() as stack:
            first = reserve_port(stack)
            with socket.socket() as other, self.assertRaises(OSError):
                other.bind(("", first))
            last = min(65535, first + 30)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=f"{first}-{last}"):
                ports = [reserve_port(stack) for _ in range(3)]
            self.assertEqual(len({first, *ports}), 4)
            self.assertTrue(all(first < port <= last for port in ports), ports)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=str(ports[0])):
                # The port is in use, but no other port is allowed. The rendezvous reports the error.
                self.assertEqual(reserve_port(stack), ports[0])
            self.assertEqual(run_ranks(2, lambda comm: comm.rank, f"tcp://127.0.0.1:{first}"), [0, 1])
            for text in ("many", "5-4", "0", "1-70000", "-3"):
                with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=text), self.assertRaisesRegex(
                        gradwire.BadArgument, f"GRADWIRE_PORTS must be .*, not '{text}'"):
                    reserve_port(stack)

    def test_network_namespaces_are_different_hosts(self) -> None:
        code = "from gradwire._process_group import _network; print(_network())"

        def network(*prefix: str) -> str:
            return subprocess.run([*prefix, sys.executable, "-c", code], check=True, capture_output=True,
                                  text=True).stdout.strip()

        self.assertEqual(network(), _process_group._network())
        unshare = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--net", "--map-root-user"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            self.skipTest("this machine does not permit network namespaces (unshare --net)")
        there = network(*unshare)
        self.assertEqual(there.split()[0], socket.gethostname())
        self.assertNotEqual(there, _process_group._network())

    def test_the_default_timeout_is_pytorchs(self) -> None:
        with contextlib.closing(gradwire.torch.Hook("fp32")) as hook:
            self.assertEqual(hook._timeout_s, 1800)  # long enough for rank 0 to write a large checkpoint
        for waits in (gradwire.Communicator, _process_group.communicator,
                      _process_group.communicator_of_store):
            self.assertEqual(inspect.signature(waits).parameters["timeout_s"].default, 1800, waits)

    def test_specs_for_types(self) -> None:
        for spec in ("bf16,schedule=ring", "bf16:schedule=ring", "powersgd,rank=2"):
            gradwire.torch.Hook(spec).close()  # a comma or a colon after the name
        for spec, travels in (("fp32", "bf16:ef=off"), ("fp8", "fp8"), ("powersgd", "powersgd:wire=bf16"),
                              ("fp32:schedule=ring,ef=on", "bf16:ef=off,schedule=ring"),
                              ("powersgd:rank=4,ef=off", "powersgd:rank=4,ef=off,wire=bf16"),
                              ("randk:ratio=0.1,wire=int8", "randk:ratio=0.1,wire=int8")):
            self.assertEqual(_buckets.spec_for(spec, torch.bfloat16), travels)
            self.assertEqual(_buckets.spec_for(spec, torch.float32), spec)


WITHOUT = {k: v for k, v in os.environ.items() if k not in ("GRADWIRE_LIBRARY", "PYTHONPATH")}
NOWHERE = {**os.environ, "GRADWIRE_LIBRARY": "/nowhere/libgradwire.so"}
SMALL_MODEL = """
import torch
def build():
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    x = torch.randn(64, 256)
    return model, lambda: torch.nn.functional.cross_entropy(model(x), x.argmax(1))
def wrong():
    return build()[0]
def broken():
    raise ValueError("a reason")
"""
ONE_RANK = "import gradwire; gradwire.Communicator().close(); "


class Package(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def python(self, *arguments: str, code: int = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Runs Python, and checks its exit code."""
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=150,
                              cwd=self.folder, **options)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def output(self, code: str, **options: Any) -> str:
        return self.python("-c", code, **options).stdout.strip()

    def cc(self, *arguments: Any) -> None:
        subprocess.run([os.environ.get("CC", "cc"), *arguments], check=True)

    def copy_of_the_package(self, *place: str) -> pathlib.Path:
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        return pathlib.Path(shutil.copytree(PACKAGE, self.folder.joinpath(*place), ignore=ignored))

    def test_structs_match_the_header(self) -> None:
        # The library rejects a wrong size, but only this test names the struct.
        structs = {"gw_comm_options": _native.CommOptions, "gw_comm_info": _native.CommInfo,
                   "gw_call_options": _native.CallOptions, "gw_tensor": _native.Tensor,
                   "gw_reducer_options": _native.ReducerOptions, "gw_range": _native.Range,
                   "gw_stats": _native.Stats, "gw_format": _native.Format}
        members = [(name, field[0]) for name, struct in structs.items() for field in struct._fields_]
        prints = [f'printf("%zu\\n", sizeof({name}));' for name in structs]
        prints += [f'printf("%zu\\n", offsetof({name}, {field}));' for name, field in members]
        program = f'#include <gradwire/gradwire.h>\n#include <stdio.h>\nint main(void){{{"".join(prints)} return 0;}}'
        source, binary = self.folder / "sizes.c", self.folder / "sizes"
        source.write_text(program)
        self.cc("-I", PACKAGE.parents[1] / "include", source, "-o", binary)
        sizes = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
        ours = [ctypes.sizeof(struct) for struct in structs.values()]
        ours += [getattr(structs[name], field).offset for name, field in members]
        self.assertEqual([int(s) for s in sizes], ours)

    def test_dir_lists_public_names_and_wrong_specs_fail_in_few_frames(self) -> None:
        listed = {name for name in dir(gradwire) if not name.startswith("__")}
        self.assertEqual(listed - {"torch", "doctor", "backend"}, set(gradwire.__all__))
        with self.assertRaisesRegex(TypeError, "^spec must be a str such as .int8. .*, not 8$"):
            gradwire.torch.Hook(8)  # type: ignore[arg-type]
        for spec in ("int9", "auto:allow=int9"):
            try:
                self.fail(str(gradwire.torch.Hook(spec)))
            except ValueError as error:
                self.assertIn("int9", str(error))
                self.assertEqual(len(traceback.extract_tb(error.__traceback__)), 2)  # with this one

    def test_import_needs_neither_torch_nor_numpy(self) -> None:
        code = ONE_RANK + "import sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
        self.assertEqual(self.output(code), "[]")

    def test_names_a_missing_library(self) -> None:
        error = self.python("-c", ONE_RANK, code=1, env=NOWHERE).stderr
        self.assertIn("/nowhere/libgradwire.so", error)
        self.assertIn("GRADWIRE_LIBRARY", error)

    def test_doctor_reports_versions_and_failures(self) -> None:
        found, broken = (self.python("-m", "gradwire.doctor", code=code, env=environment)
                         for code, environment in ((0, {**os.environ}), (1, NOWHERE)))
        self.assertEqual(found.stderr + broken.stderr, "")
        for text in (f"library {gradwire.__version__}: {_native.library_path}",
                     f"torch {torch.__version__}: ", "the mean is right"):
            self.assertIn(text, found.stdout)
        self.assertRegex(found.stdout, r"CUDA: the library has (no CUDA side\. .*nvcc|"
                                       r"a CUDA side; .*(device 0 works|no NVIDIA driver).*NCCL)")
        self.assertIn("/nowhere/libgradwire.so", broken.stdout)
        self.assertIn("GRADWIRE_LIBRARY", broken.stdout)

    def test_doctor_continues_past_broken_frameworks(self) -> None:
        for name, body in {"torch": "raise OSError('libcudart.so.12: no such file\\nmore')",
                           "jax": "raise SystemExit(3)", "numpy": "import no_such_module"}.items():
            (self.folder / f"{name}.py").write_text(body)
        search = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        found = self.python("-m", "gradwire.doctor", env={**os.environ, "PYTHONPATH": search})
        self.assertEqual(found.stderr, "")
        for line in ("torch: broken: OSError: libcudart.so.12: no such file\n",
                     "jax: broken: SystemExit: 3\n",
                     "numpy: broken: ModuleNotFoundError: No module named 'no_such_module'\n",
                     "the mean is right"):
            self.assertIn(line, found.stdout)

    def test_finds_nccl_of_pip_unless_another_is_loaded(self) -> None:
        # Installs a stand-in of version 2.77.7 at the path of the wheel nvidia-nccl-cu13, and a stand-in of
        # version 2.66.6 in another folder.
        ask = ("import ctypes; from gradwire._communicator import load_nccl; first = load_nccl(); number = "
               "ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(number)); "
               "print(first, number.value)")
        installed, other = self.folder / "nvidia/nccl/lib", self.folder / "other"
        for place, number in ((installed, 27707), (other, 26606)):
            place.mkdir(parents=True)
            (place / "nccl.c").write_text(f"int ncclGetVersion(int* v) {{ *v = {number}; return 0; }}")
            self.cc("-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", place / "nccl.c", "-o",
                    place / "libnccl.so.2")
        named = {"GRADWIRE_NCCL_LIBRARY": str(other / "libnccl.so.2")}
        load = f"import ctypes; ctypes.CDLL('{other}/libnccl.so.2'); "
        for before, more, expected in (("", {}, "2.77.7 27707"), (load, {}, "2.66.6 26606"),
                                       ("", named, "2.66.6 26606")):
            environment = {**os.environ, "PYTHONPATH": ":".join([str(self.folder), *sys.path]), **more}
            self.assertEqual(self.output(before + ask, env=environment), expected)

    def test_doctor_recommends_compression_for_slow_links_only(self) -> None:
        from gradwire import _predict
        (self.folder / "small.py").write_text(SMALL_MODEL)
        (self.folder / "trains.py").write_text("raise ValueError")
        doctor = ["-m", "gradwire.doctor", "--ranks", "4", "--model"]
        slow, fast = (self.python(*doctor, "small.py:build", "--link", link).stdout
                      for link in ("10Mbit,1ms", "1000000Tbps"))
        self.assertRegex(slow, r'Recommendation: compress\(ddp_model, "int[48]"\), [0-9.]+ times as fast')
        self.assertIn("Recommendation: no compression.", fast)
        for model, link, error in (("small.py", "1Gbit", "small.py' is not FILE.py:BUILD"),
                                   ("small.py:build", "1GBps", "'1GBps' is not RATE"),
                                   ("small.py:build", "1000", "'1000' is not RATE"),
                                   ("no.py:build", "1Gbit", "no.py:build: .*/no.py is no file"),
                                   ("small.py:no", "1Gbit", r"has no such function; no\(\) must return"),
                                   ("small.py:wrong", "1Gbit", r"returned \w+; wrong\(\) must return"),
                                   ("trains.py:build", "1Gbit", "put what trains under if __name__"),
                                   ("small.py:broken", "1Gbit", r"ValueError: a reason \(.*small.py:\d+\)"),
                                   ("small.py:build", "1GB", "--link '1GB' is not RATE")):
            with self.assertRaisesRegex(gradwire.BadArgument, error):
                _predict.report(str(self.folder / model), link, 4, "auto")
        failed = self.python(*doctor, "no.py:build", "--link", "1Gbit", code=2)
        self.assertRegex(failed.stdout + failed.stderr, "^gradwire.doctor: --model no.*: .* is no file\n$")

    def test_predicted_steps_and_compression_shrink_as_links_get_faster(self) -> None:
        from gradwire import _predict
        costs = _predict.Costs(100, 100, 60, [1 << 20, 25 << 20, 20 << 20],
                               {"fp32": (0, 0, 48e6), "int8": (0.01, 5, 12e6), "int4": (0.05, 10, 6.5e6)})
        rates = [10.0 ** n for n in range(6, 15)]
        tables = [_predict.predict(costs, (rate, 0.1), 4) for rate in rates]
        for slow, fast in zip(tables, tables[1:]):
            self.assertTrue(all(a.step_ms >= b.step_ms for a, b in zip(slow, fast)))
            self.assertLessEqual(*(_predict.recommended(t, 0.1).error for t in (fast, slow)))
        first, last = (_predict.recommended(t, 0.1).spec for t in (tables[0], tables[-1]))
        self.assertEqual((first, last), ("int4", "fp32"))
        self.assertEqual({_predict.recommended(t, 0.0).spec for t in tables}, {"fp32"})

    def test_the_example_for_ddp_trains_and_compares(self) -> None:
        shown = self.python(str(PACKAGE / "examples/ddp.py"), "int8").stdout
        found = re.findall(r"^(fp32|int8) +[0-9.]+ ms per step +([0-9,]+) bytes  loss (.+)$", shown, re.M)
        (_, plain, plain_loss), (_, sent, loss) = found
        self.assertGreater(int(plain.replace(",", "")), 3.5 * int(sent.replace(",", "")))
        self.assertAlmostEqual(float(loss), float(plain_loss), delta=0.02)

    def test_version_matches_the_header(self) -> None:
        header = (PACKAGE.parents[1] / "include" / "gradwire" / "gradwire.h").read_text()
        for part, number in zip(("MAJOR", "MINOR", "PATCH"), gradwire.__version__.split(".")):
            self.assertIn(f"#define GW_VERSION_{part} {number}\n", header)

    def test_pip_compiles_the_host_side_unless_asked_for_cuda(self) -> None:
        source, tools = self.copy_of_the_package("integrations", "python"), self.folder / "tools"
        shutil.copytree(PACKAGE.parents[1] / "include", self.folder / "include")
        tools.mkdir()
        for name, body in (("cmake", 'echo "cmake $*"; [ "$1" != --build ] || { mkdir -p "$2/lib"; '
                                     'touch "$2/lib/libgradwire.so"; }'), ("nvcc", ""), ("ninja", "")):
            (tools / name).write_text(f"#!/bin/sh\n{body}\n")
            (tools / name).chmod(0o755)
        for flags, last in (("", "OFF"), ("-DGRADWIRE_CUDA=ON", "ON")):
            environment = {**WITHOUT, "PATH": f"{tools}:{os.environ['PATH']}", "CMAKE_ARGS": flags}
            shutil.rmtree(source / "build", ignore_errors=True)
            shown = subprocess.run([sys.executable, "-c", "import build_backend as b; b.build_wheel('.')"],
                                   cwd=source, env=environment, check=True, capture_output=True, text=True)
            self.assertIn("gradwire: compiling libgradwire.so, about three minutes", shown.stdout)
            self.assertEqual(re.findall(r"-DGRADWIRE_CUDA=(\w+)", shown.stdout)[-1], last)

    def test_pip_install_includes_the_library_and_the_pages_that_messages_name(self) -> None:
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            self.fail("pip is missing; Debian has it as python3-pip (with python3-setuptools, python3-wheel)")
        target = self.folder / "installed"
        source = self.copy_of_the_package("checkout", "integrations", "python")
        pages = subprocess.run(["git", "grep", "-hoE", r"docs/[a-z-]+\.md", "--", "collectives", "kernels",
                                "integrations/python/gradwire"], cwd=PACKAGE.parents[1], capture_output=True,
                               text=True)
        (self.folder / "checkout/docs").mkdir()
        for page in (PACKAGE.parents[1] / "docs").glob("*.md"):
            shutil.copy(page, self.folder / "checkout/docs")
        self.python("-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps",
                    "--disable-pip-version-check", "--target", str(target),
                    str(source))
        version, file = self.output(ONE_RANK + "print(gradwire.__version__, gradwire.__file__)",
                                    env={**WITHOUT, "PYTHONPATH": str(target)}).split()
        self.assertEqual((version, pathlib.Path(file).parent), (gradwire.__version__, target / "gradwire"))
        self.assertIn("docs/formats.md\n", pages.stdout)
        for name in {"py.typed", "libgradwire.so", *pages.stdout.split()}:
            self.assertTrue((target / "gradwire" / name).exists(), name)
        metadata = next(target.glob("gradwire-*.dist-info/METADATA")).read_text()
        self.assertRegex(metadata, r"Requires-Dist: nvidia-nccl-cu13.*extra == .cuda.")

    def test_a_private_checkout_makes_public_wheels_and_editable_installs_find_the_library(self) -> None:
        source = self.copy_of_the_package("integrations", "python")
        shutil.copytree(PACKAGE.parents[1] / "include", self.folder / "include")
        for path in source.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        build = "import sys, build_backend as b; b.build_wheel(sys.argv[1]); b.build_editable(sys.argv[1])"
        subprocess.run([sys.executable, "-c", build, self.folder], cwd=source, umask=0o077, check=True,
                       capture_output=True)
        wheel, = (path for path in self.folder.glob("*.whl") if "editable" not in path.name)
        with zipfile.ZipFile(wheel) as packed:
            private = [i.filename for i in packed.infolist() if ~(i.external_attr >> 16) & 0o444]
        self.assertEqual(private, [])
        code = ONE_RANK + "print(gradwire._native.library_path)"
        found = self.output(code, env={**WITHOUT, "PYTHONPATH": str(source)})
        self.assertEqual(found, f"{self.folder}/build/lib/libgradwire.so")

    def test_a_zip_archive_uses_the_library_in_it_or_the_one_that_is_named(self) -> None:
        _native.library()
        library, code = _native.library_path, ONE_RANK + "print(gradwire._native.library_path)"
        archive = str(self.folder / "packages.zip")
        environment = {**WITHOUT, "PYTHONPATH": archive}
        with zipfile.ZipFile(archive, "w") as packed:
            for source in (PACKAGE / "gradwire").glob("*.py"):
                packed.write(source, f"gradwire/{source.name}")
        self.assertIn(library, self.output(code, env={**environment, "GRADWIRE_LIBRARY": library}))
        inside = "gradwire/libgradwire.so"
        for good in (False, True):
            other = shutil.copy(archive, f"{archive}{good}")
            with zipfile.ZipFile(other, "a") as packed:
                packed.writestr(inside, pathlib.Path(library).read_bytes() if good else b"not a library")
            environment["PYTHONPATH"] = other
            if good:
                self.assertEqual(self.output(code, env=environment), f"{other}/{inside}")
            else:
                self.assertIn(f"{other}/{inside}", self.python("-c", code, code=1, env=environment).stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
