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
PROGRAMS = ["gradwire", "gradwire-bench", "overlap"
            ] + [s + "_tests" for s in ("runtime", "kernels", "collectives", "trainer", "processes")]
MOST_SECONDS = 480
MOST_SECONDS_OF_FIRST = 240


class GpuCheck(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.tools = self.folder / "tools"
        self.out = self.folder / "results of today"
        for place in ("scripts", "build/bin", "tools", "build/lib", "site/nvidia/nccl/lib", "site/torch",
                      "tests/integrations", "tests/nccl", "bench/harness", "bench/experiments"):
            (self.folder / place).mkdir(parents=True)
        for script in (SCRIPT, SCRIPT.with_name("smoke.sh")):
            shutil.copy(script, self.folder / "scripts")
        for program in PROGRAMS:
            self.program(f"build/bin/{program}", f'echo "{program} $*"; echo "[  PASSED  ] 3 tests."')
        for program in ("tests/integrations/device_test.py", "tests/integrations/jax_device_test.py",
                        "tests/nccl/interposed.py", "bench/harness/graph_table.py",
                        "bench/experiments/run.py"):
            (self.folder / program).write_text("import sys; print('PASSED', *sys.argv)")
        for library in ("libgraph_trace.so", "libgradwire_nccl.so"):
            (self.folder / "build/lib" / library).touch()
        self.program("tools/compute-sanitizer", 'shift 6; exec "$@"')  # three options
        self.program("tools/ncu", "echo ncu")
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
            **os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}", "PYTHON": str(self.python),
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
        seconds, together = {}, {}
        for line in self.check("--list").stdout.splitlines():
            part, _, deadline, *how = line.split("\t")
            seconds[part] = seconds.get(part, 0) + (0 if how else int(deadline))
            together[part] = max(together.get(part, 0), int(deadline) if how else 0)
        self.assertEqual(list(seconds), ["first", "next", "unseen", "kernels", "peers", "training",
                                         "memcheck", "racecheck", "initcheck"])
        self.assertLessEqual(max(seconds[part] + together[part] for part in seconds), MOST_SECONDS)
        self.assertEqual([part for part in together if together[part]], ["unseen"])
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

    def test_a_late_part_omits_its_last_steps_and_says_so(self):
        self.program("build/bin/overlap", f"touch '{self.folder}/late'")
        self.program("tools/date", f"[ ! -e '{self.folder}/late' ] || set -- -d '+340 sec' \"$@\"\n"
                     'exec /bin/date "$@"')
        done = self.check(str(self.out), "next")
        self.assertEqual(done.returncode, 1)
        rows = self.steps()
        late = rows.pop("bench-kernels-changed")
        self.assertRegex(late, r"^NOT RUN: late, 34\d s after the part began$")
        self.assertEqual(set(rows.values()), {"ok"})
        log = self.packed("log.txt")
        for words in ("run.py gpu_training --captured --precision bf16", "--graph --gelu tanh",
                      "--graph --gradient-group 1", "gradwire-bench hook"):
            self.assertIn(words, log)
        self.assertEqual(log.count("GRADWIRE_TUNING="), 2)

    def test_side_by_side_steps_run_at_once_and_each_has_a_row_and_a_log(self):
        # Each waits for the others, and one fails.
        self.program("tools/compute-sanitizer", f"""touch "{self.folder}/began.$$"
            until [ $(ls "{self.folder}"/began.* | wc -l) -ge 9 ]; do sleep 0.05; done
            [[ $2 != racecheck || $* != *Attention* ]] || echo '========= Error: a race'
            shift 6; exec "$@" """)
        self.assertEqual(self.check(str(self.out), "unseen").returncode, 1)
        rows = self.steps()
        self.assertEqual(len(rows), 13)
        self.assertEqual({name: status for name, status in rows.items() if status != "ok"},
                         {"wheel": "NOT RUN: neither the bundle nor dist has a wheel (make wheel)",
                          "nccl-newer": f"NOT RUN: no lib/newer/libnccl.so.2 in {self.folder}/build",
                          "sanitizer-racecheck-attention": "FAILED (1)"})
        self.assertIn("a race", self.packed("sanitizer-racecheck-attention.log"))
        self.assertIn("*StoreAndIncrement*", self.packed("sanitizer-initcheck-clip-store.log"))

    def test_side_by_side_steps_are_packed_when_the_run_is_cut_off(self):
        self.program("build/bin/kernels_tests", "echo it hangs; exec sleep 600")
        running = subprocess.Popen(self.command(str(self.out), "unseen"), env=self.environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        table = self.out / "steps.tsv"
        while not table.exists() or "interposer\tok" not in table.read_text():
            self.assertIsNone(running.poll())
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        self.assertEqual(running.wait(timeout=30), 143)
        self.assertEqual(self.steps()["interposer"], "ok")
        self.assertIn("PASSED", self.packed("interposer.log"))
        self.assertIn("it hangs", self.packed("sanitizer-memcheck-int8.log"))

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
