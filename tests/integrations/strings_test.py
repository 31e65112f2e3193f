#!/usr/bin/python3
"""Tests strings for the library (NUL bytes, paths, invalid UTF-8), and the package in a zip archive."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
import zipfile
from typing import Any, Callable, Dict, List

import numpy as np

import gradwire
from gradwire import _native

PACKAGE = pathlib.Path(gradwire.__file__).resolve().parent


def average(rendezvous: Any) -> List[float]:
    """Averages 0 and 1 on two ranks of this process. Returns each rank's mean."""
    means: List[float] = [-1.0, -1.0]

    def run(rank: int) -> None:
        with gradwire.Communicator(rendezvous, rank, 2, timeout_s=30) as comm:
            means[rank] = float(comm.allreduce_(np.full(3, rank, np.float32))[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return means


class Strings(unittest.TestCase):
    def test_a_nul_byte_is_refused_in_every_string(self) -> None:
        comm = gradwire.Communicator()
        values, other = np.ones(4, np.float32), np.ones(4, np.float32)
        calls: Dict[str, Callable[[], Any]] = {
            "the rendezvous": lambda: gradwire.Communicator("local://a\0b", 0, 1),
            "the secret": lambda: gradwire.Communicator(secret="a\0b"),
            "the interface": lambda: gradwire.Communicator(interface="lo\0b"),
            "the invitation": lambda: gradwire.Communicator.join("tcp://127.0.0.1:9\0b", timeout_s=1),
            "the tag": lambda: comm.allreduce_(values, tag="a\0b"),
            "the reason": lambda: comm.abort("a\0b"),
            "the tensor's name": lambda: gradwire.Reducer(comm, "fp32", [("a\0b", 2, 2)]),
            "the format's name": lambda: gradwire.register_format("a\0b", block=4, bytes=16, encode=lambda a:
                                                                  a.view(np.uint8), decode=lambda a: a.view(
                                                                      np.float32)),
        }
        specs: List[Callable[[], Any]] = [
            lambda: comm.allreduce_(values, "int8\0junk"),
            lambda: comm.allreduce_(values, "int8\0junk", residual=other),
            lambda: comm.reduce_scatter(other, values, "int8\0junk"),
            lambda: comm.all_gather(other, values, "int8\0junk"),
            lambda: comm.all_gather_update(other, values, "int8\0junk"),
            lambda: comm.broadcast_(values, 0, "int8\0junk"),
            lambda: gradwire.Reducer(comm, "int8\0junk", [("a", 2, 2)]),
        ]
        for what, call in [*calls.items(), *(("the spec", call) for call in specs)]:
            with self.assertRaisesRegex(gradwire.BadArgument, f"{what} .*NUL"):
                call()
        comm.check()  # the communicator has not failed
        comm.close()

    def test_a_string_of_another_type_is_refused_by_name(self) -> None:
        with gradwire.Communicator() as comm:
            with self.assertRaisesRegex(TypeError, "the spec is NoneType, not str"):
                comm.allreduce_(np.ones(4, np.float32), None)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "the rendezvous is bytes"):
            gradwire.Communicator(b"tcp://localhost:1", 0, 1)  # type: ignore[arg-type]

    def test_the_rendezvous_is_a_path(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder, "meeting")
            self.assertEqual(average(place), [0.5, 0.5])
            self.assertTrue(place.parent.exists())
            before = os.getcwd()
            os.chdir(folder)
            try:
                self.assertEqual(average(pathlib.Path("relative")), [0.5, 0.5])
            finally:
                os.chdir(before)

    def test_a_path_need_not_be_unicode(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            name = os.fsdecode(os.fsencode(folder) + b"/caf\xe9")
            os.mkdir(name)
            self.assertEqual(average(f"file://{name}/meeting"), [0.5, 0.5])
            self.assertEqual(average(pathlib.Path(name, "another meeting")), [0.5, 0.5])

    def test_a_name_that_is_not_unicode_is_refused(self) -> None:
        with gradwire.Communicator() as comm:
            for name in (os.fsdecode(b"layer caf\xe9"), "\ud800"):
                with self.assertRaisesRegex(gradwire.BadArgument, "the tag .* not Unicode"):
                    comm.allreduce_(np.ones(4, np.float32), tag=name)


class Zip(unittest.TestCase):
    def archive(self, folder: str, with_library: bool) -> str:
        made = pathlib.Path(folder, "packages.zip")
        with zipfile.ZipFile(made, "w") as archive:
            for source in PACKAGE.glob("*.py"):
                archive.write(source, f"gradwire/{source.name}")
            if with_library:
                library = os.environ.get("GRADWIRE_LIBRARY") or _native.library_path
                archive.write(os.path.realpath(library), "gradwire/libgradwire.so")
        return str(made)

    def output(self, archive: str, **environment: str) -> str:
        code = "import gradwire; from gradwire import _native; gradwire.Communicator().close(); " \
               "print(gradwire.__file__, gradwire.__version__, _native.library_path)"
        inherited = {k: v for k, v in os.environ.items() if k not in ("GRADWIRE_LIBRARY", "PYTHONPATH")}
        done = subprocess.run([sys.executable, "-c", code],
                              env={**inherited, "PYTHONPATH": archive, **environment},
                              cwd=os.path.dirname(archive), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def test_the_package_in_a_zip_archive_uses_the_library_in_it(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = self.archive(folder, True)
            self.assertEqual(self.output(archive), f"{archive}/gradwire/__init__.py {_native.__version__} "
                                                   f"{archive}/gradwire/libgradwire.so")

    def test_the_package_in_a_zip_archive_uses_the_library_that_is_named(self) -> None:
        _native.library()
        with tempfile.TemporaryDirectory() as folder:
            archive = self.archive(folder, False)
            self.assertIn(_native.library_path, self.output(archive, GRADWIRE_LIBRARY=_native.library_path))

    def test_a_damaged_library_in_a_zip_archive_is_explained(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = self.archive(folder, False)
            with zipfile.ZipFile(archive, "a") as opened:
                opened.writestr("gradwire/libgradwire.so", b"not a library")
            environment = {k: v for k, v in os.environ.items() if k != "GRADWIRE_LIBRARY"}
            done = subprocess.run([sys.executable, "-c", "import gradwire; gradwire.Communicator()"],
                                  capture_output=True, text=True, env={**environment, "PYTHONPATH": archive},
                                  cwd=folder)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("packages.zip/gradwire/libgradwire.so", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
