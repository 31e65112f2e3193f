#!/usr/bin/env python3
"""Runs the real `gradwire-bench`: what its subcommands print and write, and that bad input ends in one line and code 2."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

BENCH, ROOT = "", pathlib.Path()  # from the command line


class BenchTest(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-bench-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def run_bench(self, *arguments, env=None, timeout=240):
        return subprocess.run([BENCH, *map(str, arguments)], capture_output=True, text=True, cwd=self.folder,
                              env={**os.environ, **(env or {})}, timeout=timeout)

    def rows(self, *arguments, **kwargs):
        """What a run that ends well writes with --json."""
        result = self.run_bench(*arguments, "--json", "out.json", **kwargs)
        self.assertEqual(result.returncode, 0, result.stdout[-500:] + result.stderr)
        self.assertEqual(result.stderr, "")
        return json.loads((self.folder / "out.json").read_text()), result.stdout

    def refuse(self, arguments, *parts, env=None):
        """Code 2, one line on stderr that holds every part, and no file left behind."""
        result = self.run_bench(*arguments, "--json", "out.json", env=env)
        self.assertEqual(result.returncode, 2, f"{arguments}: {result.stdout[-300:]} {result.stderr[-300:]}")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("gradwire-bench: "), lines[0])
        for part in parts:
            self.assertIn(str(part), lines[0])
        self.assertFalse((self.folder / "out.json").exists())

    def test_unwritable_json(self):
        for command in ("kernels",):
            result = self.run_bench(command, "--json", "none/out.json")
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("none/out.json", result.stderr)


class Kernels(BenchTest):
    def test_every_op_has_a_case(self):
        declared = set()
        for header in (ROOT / "kernels").glob("*.h"):
            declared |= set(re.findall(r"^GW_DECLARE_OP\((\w+),", header.read_text(), re.M))
        self.assertIn("bf16_encode", declared)
        listed = self.run_bench("kernels", "--list").stdout.splitlines()
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(declared, {line.split()[0] for line in listed})

    def test_every_case_runs_and_is_measured(self):
        listed = self.run_bench("kernels", "--list").stdout.splitlines()
        rows, out = self.rows("kernels", "--device", "host", "--max-size", "64K", "--budget-ms", "0.1",
                              "--cache", "warm")
        name = lambda r: r["op"] + (f" ({r['variant']})" if r["variant"] else "")
        self.assertEqual([name(r) for r in rows[::2]], listed)
        for row in rows:
            self.assertEqual(set(row), {"op", "variant", "family", "device", "size_bytes", "shape", "cache", "median_us",
                                        "min_us", "repeats", "bytes", "gbps", "copy_gbps", "copy_fraction", "gflops"})
            self.assertGreater(row["min_us"], 0)
            self.assertLessEqual(row["min_us"], row["median_us"])
            self.assertGreaterEqual(row["repeats"], 3)
            self.assertAlmostEqual(row["gbps"], row["bytes"] / row["min_us"] / 1e3)
            self.assertAlmostEqual(row["copy_fraction"], row["gbps"] / row["copy_gbps"])
            self.assertEqual(row["gflops"] is not None, row["op"].startswith(("gemm", "powersgd")), row)
        self.assertEqual({r["size_bytes"] for r in rows}, {4096, 65536})
        self.assertIn("Copies of a large buffer", out)

    def test_filter_and_sizes(self):
        rows, _ = self.rows("kernels", "--device", "host", "--filter", "fp8_dec", "--filter", "pack", "--min-size", "1K",
                            "--max-size", "2000", "--factor", "2", "--threads", "1", "--budget-ms", "0.1")
        self.assertEqual({r["op"] for r in rows}, {"fp8_decode", "fp8_decode_add", "fp8_decode_add_encode", "pack"})
        self.assertEqual({r["size_bytes"] for r in rows}, {1024, 2000})
        self.assertEqual({r["device"] for r in rows}, {"host, 1 thread"})
        self.assertEqual({r["cache"] for r in rows}, {"cold", "warm"})
        self.assertEqual({r["bytes"] for r in rows if r["op"] == "fp8_decode"}, {5 * 256, 5 * 500})

    def test_bad_input(self):
        self.refuse(["kernels", "--filter", "zip"], "zip", "--list")
        self.refuse(["kernels", "--device", "tpu"], "tpu", "auto, host or cuda")
        self.refuse(["kernels", "--device", "cuda"], "--device cuda", "--device host", env={"CUDA_VISIBLE_DEVICES": ""})
        self.refuse(["kernels", "--min-size", "1M", "--max-size", "4K"], "--max-size 4K", "--min-size 1M")
        self.refuse(["kernels", "--max-size", "64G"], "--max-size 64G", "too large")
        self.refuse(["kernels", "--max-size", "huge"], "--max-size")
        self.refuse(["kernels", "--threads", "0"], "--threads")
        self.refuse(["kernels", "--cache", "hot"], "--cache", "hot")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: bench_test.py PATH_OF_GRADWIRE_BENCH ROOT_OF_THE_SOURCES [unittest arguments]")
    BENCH, ROOT = os.path.abspath(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
    unittest.main()
