#!/usr/bin/env python3
"""Tests Gradwire's copy of OpenBLAS in a process with another copy: neither copy changes the other.

Each case runs in a separate process, because OpenBLAS chooses its kernels when it is loaded.
usage: blas_test.py PATH_OF_LIBGRADWIRE_BLAS PATH_OF_LIBGRADWIRE
"""
import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
import unittest

BLAS = LIBRARY = ""


class GradwireBlas(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("version", "kernels", "instead_of", "wanted", "error")]


def ours(path: str) -> dict:
    """Loads libgradwire_blas.so and multiplies two matrices with it."""
    library = ctypes.CDLL(path)
    library.gradwire_blas.restype = ctypes.POINTER(GradwireBlas)
    about = library.gradwire_blas().contents
    n = 192
    draw = random.Random(1)
    a, b = ((ctypes.c_float * (n * n))(*(draw.uniform(-1, 1) for _ in range(n * n))) for _ in range(2))
    c = (ctypes.c_float * (n * n))()
    size = ctypes.c_int64(n)
    library.gradwire_blas_sgemm(ctypes.c_bool(False), ctypes.c_bool(True), size, size, size,
                                ctypes.c_float(1), a, size, b, size, ctypes.c_float(0), c, size)
    exact = sum(x * y for x, y in zip(a[:n], b[:n]))
    return {
        "kernels": about.kernels.decode(), "error": about.error, "bits": hashlib.sha256(bytes(c)).hexdigest(),
        "off_by": abs(c[0] - exact)}


def theirs() -> dict:
    library = ctypes.CDLL("libopenblas.so.0")  # the copy of numpy or torch, if loaded
    library.openblas_get_corename.restype = ctypes.c_char_p
    return {
        "kernels": library.openblas_get_corename().decode(), "threads": library.openblas_get_num_threads()}


def mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return name in maps.read()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def child(blas: str, library: str, first: str, last: str) -> None:
    seen = {}
    if first:
        __import__(first)
        seen["before"] = theirs()
    environment, running = dict(os.environ), threads()
    ctypes.CDLL(library)
    seen["openblas_by_libgradwire"] = mapped("libopenblas") and not first
    seen["ours"] = ours(blas)
    seen["openblas_by_ours"] = mapped("libopenblas") and not first
    seen["new_threads"] = threads() - running
    seen["same_environment"] = dict(os.environ) == environment
    if last:
        __import__(last)
    if first or last:
        seen["after"] = theirs()
    print(json.dumps(seen))


class InSomebodysProcess(unittest.TestCase):
    def look(self, first: str = "", last: str = "", **variables: str) -> dict:
        environment = {k: v for k, v in os.environ.items() if "BLAS" not in k and k != "OMP_NUM_THREADS"}
        done = subprocess.run([sys.executable, __file__, "--child", BLAS, LIBRARY, first, last], text=True,
                              capture_output=True, timeout=240, env={**environment, **variables})
        self.assertEqual(done.returncode, 0, done.stderr)
        seen = json.loads(done.stdout)
        self.assertTrue(seen["same_environment"])
        self.assertEqual(seen["new_threads"], 0)
        self.assertFalse(seen["openblas_by_libgradwire"])
        self.assertFalse(seen["openblas_by_ours"])
        self.assertLess(seen["ours"]["off_by"], 1e-4)
        return seen

    @classmethod
    def setUpClass(cls):
        cls.alone = cls().look()["ours"]
        assert cls.alone["error"] is None, cls.alone

    def test_their_variables_are_not_ours(self):
        for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OPENBLAS_VERBOSE"):
            value = "Prescott" if variable == "OPENBLAS_CORETYPE" else "2"
            self.assertEqual(self.look(**{variable: value})["ours"], self.alone)

    def test_behind_numpy_and_torch(self):
        for package in ("numpy", "torch"):
            seen = self.look(first=package, OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="2")
            self.assertEqual(seen["ours"], self.alone)
            self.assertEqual(seen["before"], {"kernels": "Prescott", "threads": min(2, os.cpu_count())})
            self.assertEqual(seen["after"], seen["before"])

    def test_ahead_of_numpy(self):
        seen = self.look(last="numpy", OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="2")
        self.assertEqual(seen["ours"], self.alone)
        self.assertEqual(seen["after"], {"kernels": "Prescott", "threads": min(2, os.cpu_count())})

    def test_a_set_of_kernels_by_name(self):
        chosen = self.look(GRADWIRE_BLAS_KERNELS="Prescott")["ours"]
        self.assertEqual((chosen["kernels"], chosen["error"]), ("Prescott", None))
        if self.alone["kernels"] != "Prescott":
            self.assertNotEqual(chosen["bits"], self.alone["bits"])  # bits depend on the kernels


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    elif len(sys.argv) < 3:
        sys.exit(__doc__)
    else:
        BLAS, LIBRARY = (os.path.abspath(path) for path in (sys.argv.pop(1), sys.argv.pop(1)))
        unittest.main()
