"""Tests scripts/cuda_pip.sh with a stand-in for pip: what the script installs, when it does nothing, and how
it fails.

cuda_pip_test.py ROOT
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(sys.argv.pop()) / "scripts" / "cuda_pip.sh"
# Imitates `python -m venv FOLDER`. The folder's pip installs files like those of NVIDIA's packages, or fails
# like pip without a network.
PYTHON = r"""#!/bin/bash
mkdir -p "$3/bin"
cat > "$3/bin/pip" << 'END'
#!/bin/bash
echo "$@" >> "$PIP_CALLS"
[ -z "$PIP_FAILS" ] || { echo "WARNING: Retrying"; echo "ERROR: No matching distribution found"; exit 1; } >&2
cd "$(dirname "$0")/.." && mkdir -p lib/python3.11/site-packages && cd lib/python3.11/site-packages
mkdir -p nvidia/cu13/{bin,include,lib} nvidia/nccl/{include,lib}
touch nvidia/cu13/bin/{nvcc,cuobjdump,nvdisasm} nvidia/cu13/lib/libcublas.so.13 nvidia/nccl/include/nccl.h nvidia/nccl/lib/libnccl.so.2
chmod +x nvidia/cu13/bin/*
END
chmod +x "$3/bin/pip"
"""


class CudaPip(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.build = self.folder / "build"
        for place in ("scripts", "build"):
            (self.folder / place).mkdir()
        shutil.copy(SCRIPT, self.folder / "scripts")
        self.program("python", PYTHON)
        self.calls = self.folder / "calls"
        self.calls.touch()

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def configure(self, nvcc):
        (self.build / "CMakeCache.txt").write_text(f"CMAKE_CUDA_COMPILER:FILEPATH={nvcc}\n")

    def nvcc(self, version):
        return self.program("nvcc",
                            f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")

    def run_script(self, *arguments, fails=""):
        return subprocess.run(
            ["bash", self.folder / "scripts" / "cuda_pip.sh", *arguments], capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(self.folder / "python"), "PIP_CALLS": str(self.calls),
                 "PIP_FAILS": fails})

    def number_of_calls(self):
        return len(self.calls.read_text().splitlines())

    def test_toolkit_is_one_folder_with_linkable_libraries(self):
        self.configure("NOTFOUND")
        done = self.run_script("toolkit")
        self.assertEqual(done.returncode, 0, done.stderr)
        toolkit = self.build / "cuda-pip"
        self.assertTrue(os.access(toolkit / "bin/nvcc", os.X_OK))
        for name in ("include/nccl.h", "lib64/libcublas.so", "lib64/libnccl.so"):
            self.assertTrue((toolkit / name).is_file(), name)
        self.assertEqual(sorted(os.listdir(self.build)), ["CMakeCache.txt", "cuda-pip"])

    def test_toolkit_is_installed_once_for_each_list_of_versions(self):
        self.configure("NOTFOUND")
        self.run_script("toolkit")
        self.configure(self.build / "cuda-pip/bin/nvcc")
        self.assertEqual(self.run_script("toolkit").stdout, "")
        self.assertEqual(self.number_of_calls(), 1)
        (self.build / "cuda-pip/packages").write_text("nvidia-cuda-nvcc==12.0\n")
        self.run_script("toolkit")
        self.assertEqual(self.number_of_calls(), 2)

    def test_toolkit_is_refused_if_the_build_uses_another_nvcc(self):
        self.configure("/opt/cuda/bin/nvcc")
        done = self.run_script("toolkit")
        self.assertEqual(done.returncode, 1)
        self.assertIn("configured with /opt/cuda/bin/nvcc", done.stderr)
        self.assertEqual(self.number_of_calls(), 0)

    def test_disassembler_has_the_major_version_of_nvcc(self):
        for release, expected in (("13.0", "==13.5.37"), ("14.1", "==14.*")):
            self.configure(self.nvcc(release))
            done = self.run_script("disassembler")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(os.access(self.build / "disassembler/bin/nvdisasm", os.X_OK))
            self.assertIn(f"nvidia-cuda-nvdisasm{expected}", self.calls.read_text())
            self.assertEqual(self.run_script("disassembler").stdout, "")  # the package is already installed
            shutil.rmtree(self.build / "disassembler")

    def test_disassembler_is_not_installed_without_nvcc(self):
        for cache in (None, "NOTFOUND"):
            if cache:
                self.configure(cache)
            done = self.run_script("disassembler")
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
        self.assertEqual(self.number_of_calls(), 0)

    def test_a_failed_installation_prints_one_line_and_leaves_nothing(self):
        self.configure(self.nvcc("13.0"))
        done = self.run_script("disassembler", fails="yes")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(
            done.stdout + done.stderr, "cuda_pip: cannot install nvidia-cuda-cuobjdump==13.5.37 from PyPI: "
            "ERROR: No matching distribution found\n")
        self.assertEqual(sorted(os.listdir(self.build)), ["CMakeCache.txt"])


if __name__ == "__main__":
    unittest.main()
