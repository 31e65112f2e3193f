#!/usr/bin/python3
"""Tests the Python package: imports, the doctor, options of hooks, and `pip install .`."""
from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
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
        with_model = gradwire.torch.Hook("bf16,schedule=ring", model=torch.nn.Linear(2, 3), timeout_s=7,
                                         seed=5)
        copy = pickle.loads(pickle.dumps(with_model))
        self.assertEqual((copy.spec, copy._timeout_s, copy._seed), ("bf16,schedule=ring", 7, 5))
        model = torch.nn.Linear(2, 3)
        copy.name_parameters(model)
        self.assertEqual(copy._names.of(list(model.parameters())), ("weight", "bias"))
        with_model.close()
        copy.close()

    def test_a_reserved_port_stays_reserved_until_the_rendezvous_listens(self) -> None:
        with contextlib.ExitStack() as stack:
            port = reserve_port(stack)
            with socket.socket() as other, self.assertRaises(OSError):
                other.bind(("", port))
            self.assertEqual(run_ranks(2, lambda comm: comm.rank, f"tcp://127.0.0.1:{port}"), [0, 1])

    def test_ports_are_from_the_range_in_the_environment(self) -> None:
        with contextlib.ExitStack() as stack:
            first = reserve_port(stack)
            last = min(65535, first + 30)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=f"{first}-{last}"):
                ports = [reserve_port(stack) for _ in range(3)]
            self.assertEqual(len({first, *ports}), 4)
            for port in ports:
                self.assertTrue(first < port <= last, ports)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=str(port)):
                # The port is in use, but no other port is allowed. The rendezvous reports the error.
                self.assertEqual(reserve_port(stack), port)
        for text in ("many", "5-4", "0", "1-70000", "-3"):
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=text), contextlib.ExitStack() as stack:
                with self.assertRaisesRegex(gradwire.BadArgument, f"GRADWIRE_PORTS must be .*, not '{text}'"):
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
        hook = gradwire.torch.Hook("fp32")
        self.assertEqual(hook._timeout_s, 1800)  # long enough for rank 0 to write a large checkpoint
        hook.close()
        for waits in (gradwire.Communicator, _process_group.communicator,
                      _process_group.communicator_of_store):
            self.assertEqual(inspect.signature(waits).parameters["timeout_s"].default, 1800, waits)

    def test_specs_may_have_a_comma_after_the_name(self) -> None:
        for spec in ("bf16,schedule=ring", "bf16:schedule=ring", "powersgd,rank=2"):
            gradwire.torch.Hook(spec).close()

    def test_uncompressed_bfloat16_travels_as_bfloat16(self) -> None:
        spec = _buckets.spec_for
        self.assertEqual(spec("fp32", torch.bfloat16), "bf16:ef=off")
        self.assertEqual(spec("fp32:schedule=ring,ef=on", torch.bfloat16), "bf16:ef=off,schedule=ring")
        self.assertEqual(spec("fp32:schedule=ring", torch.float32), "fp32:schedule=ring")
        self.assertEqual(spec("fp8", torch.bfloat16), "fp8")
        self.assertEqual(spec("powersgd", torch.bfloat16), "powersgd:wire=bf16")
        self.assertEqual(spec("powersgd:rank=4,ef=off", torch.bfloat16), "powersgd:rank=4,ef=off,wire=bf16")
        self.assertEqual(spec("randk:ratio=0.1,wire=int8", torch.bfloat16), "randk:ratio=0.1,wire=int8")
        self.assertEqual(spec("powersgd:rank=4", torch.float32), "powersgd:rank=4")


class Package(unittest.TestCase):
    def python(self, code: str, **options: Any) -> str:
        """Runs a Python program. Returns the program's output."""
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                              **options).stdout.strip()

    def test_structs_match_the_header(self) -> None:
        # The library rejects a wrong size, but only this test names the struct.
        structs = {
            "gw_comm_options": _native.CommOptions, "gw_comm_info": _native.CommInfo,
            "gw_call_options": _native.CallOptions, "gw_tensor": _native.Tensor,
            "gw_reducer_options": _native.ReducerOptions, "gw_range": _native.Range,
            "gw_stats": _native.Stats, "gw_format": _native.Format
        }
        members = [(name, field[0]) for name, struct in structs.items() for field in struct._fields_]
        prints = [f'printf("%zu\\n", sizeof({name}));' for name in structs]
        prints += [f'printf("%zu\\n", offsetof({name}, {field}));' for name, field in members]
        program = f'#include <gradwire/gradwire.h>\n#include <stdio.h>\nint main(void){{{"".join(prints)} return 0;}}'
        with tempfile.TemporaryDirectory() as folder:
            source, binary = pathlib.Path(folder, "sizes.c"), pathlib.Path(folder, "sizes")
            source.write_text(program)
            subprocess.run(
                [os.environ.get("CC", "cc"), "-I", PACKAGE.parents[1] / "include", source, "-o", binary],
                check=True)
            sizes = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
        ours = [ctypes.sizeof(struct) for struct in structs.values()]
        ours += [getattr(structs[name], field).offset for name, field in members]
        self.assertEqual([int(s) for s in sizes], ours)

    def test_import_needs_neither_torch_nor_numpy(self) -> None:
        code = (
            "import sys; import gradwire; gradwire.Communicator().close(); print(sorted({'torch', 'numpy'} &"
            " set(sys.modules)))"
        )
        self.assertEqual(self.python(code), "[]")

    def test_names_a_missing_library(self) -> None:
        environment = {**os.environ, "GRADWIRE_LIBRARY": "/nowhere/libgradwire.so"}
        done = subprocess.run([sys.executable, "-c", "import gradwire; gradwire.Communicator()"],
                              env=environment, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("/nowhere/libgradwire.so", done.stderr)
        self.assertIn("GRADWIRE_LIBRARY", done.stderr)

    def test_doctor_reports_versions_and_failures(self) -> None:
        doctor = [sys.executable, "-m", "gradwire.doctor"]
        found = subprocess.run(doctor, capture_output=True, text=True, timeout=100)
        self.assertEqual((found.returncode, found.stderr), (0, ""), found.stdout)
        self.assertIn(f"library {gradwire.__version__}: {_native.library_path}", found.stdout)
        self.assertIn(f"torch {torch.__version__}: ", found.stdout)
        self.assertIn("the mean is right", found.stdout)
        self.assertRegex(
            found.stdout,
            r"CUDA: the library has (no CUDA side\. .*nvcc|a CUDA side; .*(device 0 works|no NVIDIA"
            " driver).*NCCL)",
        )
        broken = subprocess.run(doctor, capture_output=True, text=True, timeout=100,
                                env={**os.environ, "GRADWIRE_LIBRARY": "/nowhere/libgradwire.so"})
        self.assertEqual((broken.returncode, broken.stderr), (1, ""), broken.stdout)
        self.assertIn("/nowhere/libgradwire.so", broken.stdout)
        self.assertIn("GRADWIRE_LIBRARY", broken.stdout)

    def test_doctor_continues_past_broken_frameworks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, body in {"torch": "raise OSError('libcudart.so.12: no such file\\nmore')",
                               "jax": "raise SystemExit(3)", "numpy": "import no_such_module"}.items():
                pathlib.Path(folder, f"{name}.py").write_text(body)
            search = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            found = subprocess.run([sys.executable, "-m", "gradwire.doctor"], capture_output=True, text=True,
                                   timeout=100, env={**os.environ, "PYTHONPATH": search})
        self.assertEqual((found.returncode, found.stderr), (0, ""), found.stdout)
        for line in ("torch: broken: OSError: libcudart.so.12: no such file\n",
                     "jax: broken: SystemExit: 3\n",
                     "numpy: broken: ModuleNotFoundError: No module named 'no_such_module'\n",
                     "the mean is right"):
            self.assertIn(line, found.stdout)

    def test_finds_nccl_of_pip_unless_another_is_loaded(self) -> None:
        # Installs a stand-in of version 2.77.7 at the path of the wheel nvidia-nccl-cu13, and a stand-in of
        # version 2.66.6 in another folder.
        source = "int ncclGetVersion(int* version) { *version = %d; return 0; }"
        ask = (
            "import ctypes; from gradwire._communicator import load_nccl; first = load_nccl(); number ="
            " ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(number)); print(first,"
            " number.value)"
        )
        with tempfile.TemporaryDirectory() as folder:
            installed, other = pathlib.Path(folder, "nvidia", "nccl", "lib"), pathlib.Path(folder, "other")
            for place, number in ((installed, 27707), (other, 26606)):
                place.mkdir(parents=True)
                (place / "nccl.c").write_text(source % number)
                subprocess.run([
                    os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2",
                    place / "nccl.c", "-o", place / "libnccl.so.2"
                ], check=True)
            for before, more, expected in (("", {}, "2.77.7 27707"),
                                           (f"import ctypes; ctypes.CDLL('{other}/libnccl.so.2'); ", {},
                                            "2.66.6 26606"),
                                           ("", {"GRADWIRE_NCCL_LIBRARY": str(other / "libnccl.so.2")},
                                            "2.66.6 26606")):
                environment = {**os.environ, "PYTHONPATH": ":".join([folder, *sys.path]), **more}
                self.assertEqual(self.python(before + ask, env=environment), expected)

    def test_version_matches_the_header(self) -> None:
        header = (PACKAGE.parents[1] / "include" / "gradwire" / "gradwire.h").read_text()
        for part, number in zip(("MAJOR", "MINOR", "PATCH"), gradwire.__version__.split(".")):
            self.assertIn(f"#define GW_VERSION_{part} {number}\n", header)

    def test_pip_install_includes_the_library(self) -> None:
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            self.fail(
                "pip is missing; Debian has it as python3-pip (with python3-setuptools and python3-wheel)")
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "source"), pathlib.Path(folder, "installed")
            shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build",
                                                                           "*.egg-info"))
            subprocess.run([
                sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation",
                "--no-deps", "--disable-pip-version-check", "--target", target, source
            ], check=True)
            environment = {k: v for k, v in os.environ.items() if k not in ("GRADWIRE_LIBRARY", "PYTHONPATH")}
            code = (
                "import gradwire; gradwire.Communicator().close(); print(gradwire.__version__,"
                " gradwire.__file__)"
            )
            output = self.python(code, env={**environment, "PYTHONPATH": str(target)}, cwd=folder)
            version, file = output.split()
            self.assertEqual(version, gradwire.__version__)
            self.assertEqual(pathlib.Path(file).parent, target / "gradwire")
            self.assertTrue((target / "gradwire" / "py.typed").exists())
            self.assertTrue((target / "gradwire" / "libgradwire.so").exists())
            metadata = next(target.glob("gradwire-*.dist-info/METADATA")).read_text()
            self.assertRegex(metadata, r"Requires-Dist: nvidia-nccl-cu13.*extra == .cuda.")

    def test_a_private_checkout_makes_public_wheels_and_editable_installs_find_the_library(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "integrations", "python")
            shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build",
                                                                           "*.egg-info"))
            shutil.copytree(PACKAGE.parents[1] / "include", pathlib.Path(folder, "include"))
            for path in source.rglob("*"):
                path.chmod(0o700 if path.is_dir() else 0o600)
            build = "import sys, build_backend as b; b.build_wheel(sys.argv[1]); b.build_editable(sys.argv[1])"
            subprocess.run([sys.executable, "-c", build, folder], cwd=source, umask=0o077, check=True,
                           capture_output=True)
            wheel, = (path for path in pathlib.Path(folder).glob("*.whl") if "editable" not in path.name)
            with zipfile.ZipFile(wheel) as packed:
                private = [i.filename for i in packed.infolist() if ~(i.external_attr >> 16) & 0o444]
            self.assertEqual(private, [])
            environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_LIBRARY"}
            code = "import gradwire; gradwire.Communicator().close(); print(gradwire._native.library_path)"
            found = self.python(code, env={**environment, "PYTHONPATH": str(source)}, cwd=folder)
            self.assertEqual(found, f"{folder}/build/lib/libgradwire.so")


if __name__ == "__main__":
    unittest.main(verbosity=2)
