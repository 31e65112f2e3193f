"""Tests scripts/gpu_check.sh with stand-ins for the programs and for nvidia-smi: which steps the script runs,
and which results remain when a step fails or hangs, or when the script is interrupted."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

SCRIPT = pathlib.Path(sys.argv.pop()) / "scripts" / "gpu_check.sh"
PROGRAMS = ["gradwire", "gradwire-bench"
            ] + [s + "_tests" for s in ("runtime", "kernels", "collectives", "trainer", "processes")]
MOST_SECONDS = 480
MOST_SECONDS_OF_FIRST = 240


class GpuCheck(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.tools = self.folder / "tools"
        self.out = self.folder / "results of today"
        for place in ("scripts", "build/bin", "tools", "build/lib", "site/nvidia/nccl/lib", "site/torch"):
            (self.folder / place).mkdir(parents=True)
        for script in (SCRIPT, SCRIPT.with_name("smoke.sh")):
            shutil.copy(script, self.folder / "scripts")
        for program in PROGRAMS:
            self.program(f"build/bin/{program}", f'echo "{program} $*"; echo "[  PASSED  ] 3 tests."')
        (self.folder / "tests/integrations").mkdir(parents=True)
        for program in ("device_test.py", "jax_device_test.py"):
            (self.folder / "tests/integrations" / program).write_text("print('PASSED')")
        self.machine("580.65.06")
        for module in ("jax", "optax"):
            (self.folder / "site" / f"{module}.py").touch()
        (self.folder / "site" / "torch" / "__init__.py").write_text(
            "__version__ = 'stand-in'\nclass version: cuda = '13.0'\n")
        self.python = self.folder / "tools" / "python-with-torch"
        self.program("tools/python-with-torch",
                     f'PYTHONPATH="{self.folder}/site" exec {sys.executable} "$@"')

    def program(self, path, body):
        file = self.folder / path
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def machine(self, driver):
        self.program("tools/nvidia-smi", f'case "$*" in *query-gpu=driver_version*) echo {driver} ;; '
                     '*query-gpu=name\\ *) echo "NVIDIA Test 1" ;; *) echo GPU ;; esac')

    def environment(self, **more):
        return {
            **os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}", "GPU_CHECK_PYTHON": str(self.python),
            **more}

    def command(self, *args):
        return ["bash", str(self.folder / "scripts" / "gpu_check.sh"), *args]

    def check(self, *args, **more):
        return subprocess.run(self.command(*args), env=self.environment(**more), capture_output=True,
                              text=True, timeout=60)

    def steps(self):
        rows = [line.split("\t") for line in (self.out / "steps.tsv").read_text().splitlines()[1:]]
        return {row[1]: row[2] for row in rows}

    def packed(self, name):
        with tarfile.open(self.out / "gpu-check.tar.gz") as archive:
            return archive.extractfile(name).read().decode()

    def test_each_part_fits_into_eight_minutes_and_first_into_four(self):
        seconds = {}
        for line in self.check("--list").stdout.splitlines():
            part, _, deadline = line.split("\t")
            seconds[part] = seconds.get(part, 0) + int(deadline)
        self.assertEqual(list(seconds),
                         ["first", "kernels", "peers", "training", "memcheck", "racecheck", "initcheck"])
        self.assertLessEqual(max(seconds.values()), MOST_SECONDS)
        self.assertLessEqual(seconds["first"], MOST_SECONDS_OF_FIRST)

    def test_the_benches_get_the_python_that_has_torch_and_few_files_are_left(self):
        done = self.check(str(self.out), "peers")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        log = self.packed("log.txt")
        for bench in ("hook", "orthonormalize"):
            line = next(line for line in log.splitlines() if line.startswith(f"gradwire-bench {bench} "))
            self.assertIn(f"--baseline --python {self.python} ", line)
        self.assertEqual(sorted(p.name for p in self.out.iterdir()),
                         ["README.md", "gpu-check.tar.gz", "steps.tsv"])
        self.assertIn("torch stand-in", (self.out / "README.md").read_text())

    def test_nccl_is_found_in_pythons_packages_although_cublas_is_not(self):
        library = self.folder / "site/nvidia/nccl/lib/libnccl.so.2"
        library.write_bytes(b"")
        self.program("tools/ldconfig", "true")  # the system has no such library
        self.check(str(self.out), "peers", GPU_CHECK_ONLY="none")
        self.assertEqual((self.folder / "build/lib/libnccl.so.2").resolve(), library.resolve())

    def test_a_step_that_fails_is_in_the_table_and_in_the_status(self):
        self.program("build/bin/kernels_tests", 'echo "[  PASSED  ] 0 tests."')
        done = self.check(str(self.out), "first", GPU_CHECK_ONLY="tests-[krc]")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(self.steps(),
                         {"tests-runtime": "ok", "tests-kernels": "FAILED (1)", "tests-collectives": "ok"})
        self.assertIn("| first | tests-kernels | FAILED (1) |", self.packed("README.md"))

    def test_results_are_packed_when_the_run_is_cut_off(self):
        self.program("build/bin/kernels_tests", f"echo it hangs; touch '{self.folder}/hangs'; exec sleep 600")
        running = subprocess.Popen(self.command(str(self.out), "first"),
                                   env=self.environment(GPU_CHECK_ONLY="doctor|kernels"),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (self.folder / "hangs").exists():
            self.assertIsNone(running.poll())
            time.sleep(0.05)
        self.assertIn("| first | doctor | ok |", (self.out / "README.md").read_text(), "written as it comes")
        running.send_signal(signal.SIGTERM)
        self.assertEqual(running.wait(timeout=30), 143)
        self.assertIn("it hangs", self.packed("log.txt"))
        self.assertEqual(self.steps(), {"doctor": "ok"})

    def test_what_cannot_work_is_said_in_one_line(self):
        self.machine("570.86.10")
        self.assertEqual(self.check(str(self.out)).stderr,
                         "gpu-check: driver 570.86.10 is too old for CUDA 13, which needs R580 or later; "
                         "update the driver\n")
        self.assertFalse(self.out.exists())
        self.assertIn("no part 'kernel'; the parts are", self.check(str(self.out), "kernel").stderr)
        self.program("tools/nvidia-smi", "exit 9")
        self.assertIn("no GPU", self.check(str(self.out)).stderr)


if __name__ == "__main__":
    unittest.main()
