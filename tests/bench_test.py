#!/usr/bin/env python3
"""Runs the real `gradwire-bench`: what its subcommands print and write, and how they refuse bad input."""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cli"))
from command import as_user  # noqa: E402

BENCH, ROOT = "", pathlib.Path()  # from the command line


class BenchTest(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-bench-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def environment(self, extra):
        clean = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE",
                         "LOCAL_RANK") and not k.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_"))
        }
        # Cold timings write twice the last-level cache before each sample, which takes seconds where that is
        # large.
        return {**clean, "GRADWIRE_BENCH_FLUSH_BYTES": str(4 << 20), **(extra or {})}

    def run_bench(self, *arguments, env=None, timeout=240):
        return subprocess.run([BENCH, *map(str, arguments)], capture_output=True, text=True, cwd=self.folder,
                              env=self.environment(env), timeout=timeout)

    def rows(self, *arguments, **kwargs):
        """Returns the rows and the output of a successful run with --json."""
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
        for command in ("kernels", "formats", "hook", "collectives", "orthonormalize", "step"):
            result = self.run_bench(command, "--json", "none/out.json")
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("none/out.json", result.stderr)


class Step(BenchTest):
    def test_a_world_of_one_in_three_ways(self):
        rows, out = self.rows("step", "--device", "host", "--batch-size", 1, "--compression",
                              "powersgd:rank=2", "--seconds", 0.01)
        self.assertEqual(
            set(rows[0]), {
                "model", "device", "batch_size", "compression", "rounds", "reducer_ms", "bypassed_ms",
                "graph_ms", "reducer_ratio", "graph_ratio"
            })
        self.assertGreaterEqual(rows[0]["rounds"], 3)
        self.assertIn("vit_tiny", out)

    def test_bad_input(self):
        self.refuse(["step", "--model", "vit"], "unknown model 'vit'")
        self.refuse(["step", "--batch-size", 0], "--batch-size")
        self.refuse(["step", "--compression", "zip"], "unknown method 'zip'")


class Kernels(BenchTest):
    def test_every_op_has_a_case(self):
        declared = set()
        for header in (ROOT / "kernels").rglob("*.h"):
            declared |= set(
                re.findall(r"^GW_(?:SIDES|TYPED_SIDES|DECLARE_OP)\((\w+),", header.read_text(), re.M))
        blocks = (ROOT / "kernels/wire/block_formats.h").read_text()
        declared |= {name + op for name in re.findall(r"\bFORMAT\(\w+, (\w+)\)", blocks)
                     for op in ("_reduce_encode", "_decode")}
        self.assertIn("bf16_reduce_encode", declared)
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
            self.assertEqual(
                set(row), {
                    "op", "variant", "family", "device", "size_bytes", "shape", "cache", "median_us",
                    "min_us", "repeats", "bytes", "gbps", "copy_gbps", "copy_fraction", "gflops"
                })
            self.assertGreater(row["min_us"], 0)
            self.assertLessEqual(row["min_us"], row["median_us"])
            self.assertGreaterEqual(row["repeats"], 3)
            self.assertAlmostEqual(row["gbps"], row["bytes"] / row["median_us"] / 1e3)
            self.assertAlmostEqual(row["copy_fraction"], row["gbps"] / row["copy_gbps"])
            multiplies = row["op"].startswith(
                ("attention", "gemm", "powersgd")) and row["op"] != "powersgd_overwrite"
            self.assertEqual(row["gflops"] is not None, multiplies, row)
        self.assertEqual({r["size_bytes"] for r in rows}, {4096, 65536})
        self.assertIn("Copies of a large buffer", out)

    def test_filter_and_sizes(self):
        rows, _ = self.rows("kernels", "--device", "host", "--filter", "fp8_dec", "--filter", "pack",
                            "--min-size", "1K", "--max-size", "2000", "--factor", "2", "--threads", "1",
                            "--budget-ms", "0.1")
        self.assertEqual({r["op"] for r in rows}, {"fp8_decode", "mxfp8_decode", "pack"})
        self.assertEqual({r["size_bytes"] for r in rows}, {1024, 2000})
        self.assertEqual({r["device"] for r in rows}, {"host, 1 thread"})
        self.assertEqual({r["cache"] for r in rows}, {"cold", "warm"})
        self.assertEqual({r["bytes"]
                          for r in rows if r["op"] == "fp8_decode"}, {5.0078125 * 256, 5.0078125 * 500})

    def test_bad_input(self):
        self.refuse(["kernels", "--filter", "zip"], "zip", "--list")
        self.refuse(["kernels", "--filter", "pack", "--filter", "bf16_encode"], "bf16_encode", "--list")
        self.refuse(["kernels", "--device", "tpu"], "tpu", "auto,host,cuda")
        self.refuse(["kernels", "--device", "cuda"], "--device cuda", "--device host",
                    env={"CUDA_VISIBLE_DEVICES": ""})
        self.refuse(["kernels", "--min-size", "1M", "--max-size", "4K"], "--max-size 4K", "--min-size 1M")
        self.refuse(["kernels", "--max-size", "64G"], "--max-size 64G", "too large")
        self.refuse(["kernels", "--max-size", "huge"], "--max-size")
        self.refuse(["kernels", "--threads", "0"], "--threads")
        self.refuse(["kernels", "--cache", "hot"], "--cache", "hot")
        for wrong in ("lots", "12M", "4095"):
            self.refuse(["kernels"], f"GRADWIRE_BENCH_FLUSH_BYTES={wrong}", "4096",
                        env={"GRADWIRE_BENCH_FLUSH_BYTES": wrong})


QUICK_FORMATS = ["--size", "64K", "--budget-ms", "0.1"]


class Formats(BenchTest):
    def measured(self, *arguments):
        rows, out = self.rows("formats", *QUICK_FORMATS, *arguments)
        for row in rows:
            self.assertEqual(list(row), [
                "spec", "bytes_per_element", "stated_error", "on", "device", "speed_bytes",
                "encode_copy_fraction", "decode_copy_fraction", "copy_gbps"
            ])
            self.assertEqual(row["encode_copy_fraction"] is None, row["spec"] == "fp32")
        return {row["spec"]: row for row in rows}, out

    def test_the_formats_page_has_the_table_of_formats(self):
        table = self.run_bench("formats", "--list").stdout
        self.assertIn("| `bf16` | 2 |", table)
        self.assertIn(table, (ROOT / "docs/formats.md").read_text())

    def test_every_format_has_the_error_that_it_states(self):
        rows, out = self.measured("--rows", 4, "--elements", 16384, "--draws", 2)
        listed = re.findall(r"^\| `(\w+)(\S*)` \|", self.run_bench("formats", "--list").stdout, re.M)
        self.assertGreaterEqual(len(listed), 4)
        for name, options in listed:
            self.assertIn(name, rows)
            if "round=" in options:
                self.assertTrue(any(spec.startswith(name) and "stochastic" in spec for spec in rows), name)
        for spec, row in rows.items():
            self.assertIn(f"\n{spec} ", out)
            self.assertEqual([on["data"] for on in row["on"]], ["gaussian", "student-t3", "log-normal"])
            if "round=stochastic" not in spec:
                self.assertLess(abs(row["on"][0]["error"] - row["stated_error"]),
                                0.15 * row["stated_error"] + 1e-12, spec)

    def test_stochastic_rounding_is_unbiased_and_nearest_is_its_own_bias(self):
        names = ["bf16", "fp8", "int8"]
        specs = [word for name in names for word in ("--spec", name, "--spec", name + ":round=stochastic")]
        rows, _ = self.measured(*specs, "--rows", 2, "--elements", 32768, "--draws", 32)
        for name in names:
            for on in rows[name]["on"]:
                self.assertIsNone(on["bias_by_chance"])
                self.assertAlmostEqual(on["bias"] ** 2, on["total_error"])
            for on in rows[name + ":round=stochastic"]["on"]:
                self.assertLess(abs(on["bias"] / on["bias_by_chance"] - 1), 0.05, (name, on))
                self.assertAlmostEqual(on["bias_by_chance"] ** 2 * 32 / on["total_error"], 1, delta=0.1)
        again, _ = self.measured(*specs, "--rows", 2, "--elements", 32768, "--draws", 32)
        self.assertEqual([row["on"] for row in rows.values()], [row["on"] for row in again.values()])
        other, _ = self.measured("--spec", "bf16", "--rows", 2, "--elements", 32768, "--seed", 2)
        self.assertNotEqual(rows["bf16"]["on"], other["bf16"]["on"])

    def write(self, name, tensors, dtype="F32"):
        """Tensors as safetensors: name -> floats."""
        header, data = {}, b""
        for tensor, values in tensors.items():
            raw = struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'd'}", *values)
            header[tensor] = {
                "dtype": dtype, "shape": [len(values)], "data_offsets": [len(data),
                                                                         len(data) + len(raw)]
            }
            data += raw
        text = json.dumps(header).encode()
        (self.folder / "grads").mkdir(exist_ok=True)
        (self.folder / "grads" / name).write_bytes(struct.pack("<Q", len(text)) + text + data)

    def test_gradients_are_judged_by_tensor_and_together(self):
        off = 1 + 2.0 ** -9  # BF16 rounds it to 1
        self.write("a.safetensors", {"exact": [1, -2, 0.5], "rounded": [off], "zero": [0, 0], "none": []})
        rows, out = self.measured("--gradients", "grads", "--spec", "bf16", "--spec", "fp32")
        (on,) = rows["bf16"]["on"]
        self.assertEqual([(t["name"], t["elements"]) for t in on["tensors"]], [("exact", 3), ("rounded", 1)])
        self.assertEqual([t["error"] for t in on["tensors"]], [0, (off - 1) ** 2 / off ** 2])
        self.assertAlmostEqual(on["total_error"] / ((off - 1) ** 2 / (off ** 2 + 5.25)), 1)
        self.assertAlmostEqual(on["error"] / ((off - 1) ** 2 / off ** 2 / 2), 1)
        self.assertEqual((on["data"], on["rows"], on["bytes_per_element"]), ("gradients", 2, 2))
        self.assertIn("2 tensors of grads", out)
        self.write("b.safetensors", {"exact": [3.0] * 5})
        (on,) = self.measured("--gradients", "grads", "--spec", "bf16")[0]["bf16"]["on"]
        self.assertEqual([t["name"] for t in on["tensors"]], ["a:exact", "a:rounded", "b:exact"])

    def test_bad_input(self):
        refuse = lambda *arguments: self.refuse(["formats", *QUICK_FORMATS, *arguments[0]], *arguments[1:])
        refuse(["--spec", "zip"], "unknown method 'zip'")
        refuse(["--spec", "powersgd:rank=4"], "--spec powersgd:rank=4", "not a wire format", "hook")
        refuse(["--draws", 1], "--draws")
        refuse(["--gradients", "grads", "--rows", 4], "--gradients", "--rows")
        refuse(["--gradients", "grads"], "--gradients grads", "no such folder")
        (self.folder / "grads").mkdir()
        refuse(["--gradients", "grads"], "--gradients grads", "no *.safetensors", "--dump-gradients")
        (self.folder / "grads/a.safetensors").write_text("not safetensors at all")
        refuse(["--gradients", "grads"], "grads/a.safetensors", "not a safetensors file")
        refuse(["--gradients", "grads/a.safetensors"], "not a folder")
        for tensors in ({}, {"x": []}, {"x": [0, 0]}):
            self.write("a.safetensors", tensors)
            refuse(["--gradients", "grads"], "--gradients grads", "zero")
        self.write("a.safetensors", {"x": [1, float("nan")]})
        refuse(["--gradients", "grads"], "grads/a.safetensors", "'x'", "not finite")
        self.write("a.safetensors", {"x": [1, 2]}, "F64")
        refuse(["--gradients", "grads"], "grads/a.safetensors", "'x'", "F64")


HOOK_FIELDS = [
    "spec", "device", "model", "elements", "ms", "floor_ms", "copy_gbps", "extra_bytes", "baseline",
    "baseline_ms", "speedup"
]


class Hook(BenchTest):
    def hook(self, *arguments, **kwargs):
        rows, out = self.rows("hook", "--model", "vit_tiny", "--device", "host", "--steps", 2, *arguments,
                              **kwargs)
        for row in rows:
            self.assertEqual(list(row), HOOK_FIELDS)
            self.assertEqual((row["device"], row["model"]), ("host", "vit_tiny"))
            self.assertGreater(row["ms"], 0)
        return {row["spec"]: row for row in rows}, out

    def test_every_kind_of_spec(self):
        specs = [
            "fp32", "bf16", "bf16:ef=off", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16",
            "powersgd:rank=2,ef=off", "powersgd:rank=2,alternate=on", "randk:ratio=0.01",
            "randk:ratio=0.01,ef=off"
        ]
        rows, _ = self.hook(*[word for spec in specs for word in ("--compression", spec)])
        self.assertEqual(list(rows), specs)
        elements = rows["fp32"]["elements"]
        for spec, floor in (("fp32", 0), ("bf16", 20), ("bf16:ef=off", 12), ("fp8", 18 + 2 / 128),
                            ("powersgd:rank=2", 20), ("powersgd:rank=2,wire=bf16", 20),
                            ("powersgd:rank=2,ef=off", 12), ("powersgd:rank=2,alternate=on", 16),
                            ("randk:ratio=0.01", 16), ("randk:ratio=0.01,ef=off", 8)):
            row = rows[spec]
            self.assertAlmostEqual(row["floor_ms"] * row["copy_gbps"] * 1e6, floor * elements,
                                   delta=1 + elements / 100)
            self.assertEqual((row["baseline"], row["baseline_ms"], row["speedup"]), (None, None, None))
        self.assertEqual(rows["fp32"]["extra_bytes"], 0)
        # The residual: a float per element, and gaps that align tensors. Then the wire's staging.
        self.assertGreaterEqual(rows["bf16"]["extra_bytes"], 6 * elements)
        self.assertLess(rows["bf16"]["extra_bytes"], 6.1 * elements)
        self.assertGreater(rows["powersgd:rank=2"]["extra_bytes"], 4 * elements)
        self.assertLess(rows["powersgd:rank=2,ef=off"]["extra_bytes"], elements)
        self.assertLess(rows["randk:ratio=0.01"]["extra_bytes"], 4.5 * elements)

    def test_pytorch_in_the_same_run(self):
        rows, out = self.hook("--baseline", "--compression", "powersgd:rank=2", "--compression", "bf16",
                              "--compression", "fp8")
        for spec, hook in (("powersgd:rank=2", "powerSGD_hook rank 2"), ("bf16", "bf16_compress_hook")):
            self.assertRegex(rows[spec]["baseline"], "^torch .* " + hook)
            self.assertAlmostEqual(rows[spec]["speedup"], rows[spec]["baseline_ms"] / rows[spec]["ms"])
        self.assertIsNone(rows["fp8"]["baseline"])  # PyTorch has none
        self.assertIn("powerSGD_hook", out)

    def test_model_sizes(self):
        for model, elements in (("resnet18", 11_689_512), ("resnet50", 25_557_032)):
            rows, _ = self.rows("hook", "--model", model, "--device", "host", "--steps", 1, "--compression",
                                "fp32")
            self.assertEqual(rows[0]["elements"], elements)

    def test_bad_input(self):
        small = ["hook", "--model", "vit_tiny", "--device", "host"]
        self.refuse(["hook", "--model", "vgg"], "'vgg'", "resnet50", "vit_l_32")
        self.refuse([*small, "--compression", "zip"], "unknown method 'zip'")
        self.refuse([*small, "--steps", "0"], "--steps")
        self.refuse([*small, "--baseline", "--python", "/nowhere/python"], "/nowhere/python", "No such file")
        python = self.folder / "python"
        python.write_text("#!/bin/sh\necho '{\"missing\": \"No module named torch\"}'\n")
        python.chmod(0o755)
        self.refuse([*small, "--baseline", "--python", python], "No module named torch", "python3-torch")

    def test_a_baseline_that_dies_is_an_error(self):
        python = self.folder / "python"
        python.write_text("#!/bin/sh\necho 'that hurt' >&2\nexit 3\n")
        python.chmod(0o755)
        result = self.run_bench("hook", "--model", "vit_tiny", "--device", "host", "--baseline", "--python",
                                python)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
        self.assertIn("that hurt", result.stderr)


COLLECTIVES_FIELDS = [
    "schedule", "spec", "transport", "ranks", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps",
    "effective_busbw_gbps", "wire_bytes", "wrong", "rel_error", "baseline_time_us"
]
QUICK = ["-n", 2, "-w", 1]


class Collectives(BenchTest):
    def check(self, rows, transport, ranks):
        for row in rows:
            self.assertEqual(list(row), COLLECTIVES_FIELDS)
            self.assertEqual((row["transport"], row["ranks"], row["wrong"]), (transport, ranks, 0))
            self.assertAlmostEqual(row["algbw_gbps"], row["size_bytes"] / row["time_us"] / 1e3)
            self.assertAlmostEqual(row["effective_busbw_gbps"], row["algbw_gbps"] * 2 * (ranks - 1) / ranks)

    def test_no_format_has_wrong_results(self):
        # Most formats of few bits do not represent the integers by which exact formats are checked.
        specs = ["int8", "int4", "int2", "natural", "mxfp8", "mxfp4", "sign", "topk", "int4:rotate=hadamard"]
        rows, _ = self.rows("collectives", "--transport", "local", "--ranks", "3", "-b", "64K", "-e", "64K",
                            "--schedule", "two_shot", "--no-baseline", *QUICK,
                            *[word for spec in specs for word in ("--compression", spec)])
        self.assertEqual([row["wrong"] for row in rows], [0] * len(specs))

    def test_every_schedule_and_spec_between_threads(self):
        specs = ["fp32", "bf16", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16"]
        rows, out = self.rows("collectives", "--transport", "local", "-b", "1000", "-e", "64K", "-f", "64",
                              *QUICK, *[word for spec in specs for word in ("--compression", spec)])
        self.check(rows, "local", 4)
        self.assertEqual([(r["size_bytes"], r["spec"], r["schedule"]) for r in rows],
                         [(size, spec, schedule) for size in (1000, 64000) for spec in specs
                          for schedule in ("ring", "tree", "two_shot", "hierarchical")])
        errors = {
            "fp32": (1e-9, 1e-6), "bf16": (1e-3, 1e-2), "fp8": (1e-2, 1e-1), "powersgd:rank=2": (0.5, 1.1)
        }
        for row in rows:
            self.assertIsNone(row["baseline_time_us"])
            least, most = errors[row["spec"].removesuffix(",wire=bf16")]
            self.assertTrue(least < row["rel_error"] < most, row)
            if row["spec"] == "fp32":
                self.assertAlmostEqual(row["busbw_gbps"], row["effective_busbw_gbps"])
        large = {(r["schedule"], r["spec"]): r["wire_bytes"] for r in rows if r["size_bytes"] == 64000}
        self.assertEqual(large["ring", "fp32"], 64000 * 2 * 3 / 4)
        self.assertEqual(large["two_shot", "bf16"], 32000 * 2 * 3 / 4)
        self.assertLess(large["ring", "powersgd:rank=2"], large["ring", "fp32"] / 15)
        self.assertEqual(out.count("\n"), 3 + len(rows))

    def test_odd_worlds(self):
        for ranks in (1, 3):
            rows, _ = self.rows("collectives", "--transport", "local", "--ranks", ranks, "-b", "4K", "-e",
                                "4K", *QUICK, "--compression", "bf16")
            self.check(rows, "local", ranks)
            self.assertEqual([r["schedule"] for r in rows], ["ring", "tree", "two_shot"])
        rows, _ = self.rows("collectives", "--transport", "local", "--ranks", 20, "-b", "8K", "-e", "8K",
                            *QUICK, "-c", 0, "--compression", "fp32:schedule=tree")
        self.assertEqual([(r["schedule"], r["wrong"], r["rel_error"]) for r in rows], [("tree", None, None)])

    def test_processes_next_to_gloo(self):
        rows, _ = self.rows("collectives", "--transport", "tcp", "--ranks", 2, "-b", "64K", "-e", "64K",
                            *QUICK, "--schedule", "ring", "--compression", "fp32", "--compression",
                            "powersgd:rank=2")
        self.check(rows, "tcp", 2)
        self.assertEqual([r["spec"] for r in rows], ["fp32", "powersgd:rank=2"])
        for row in rows:
            self.assertGreater(row["baseline_time_us"], 0)

    def test_started_by_a_launcher(self):
        common = [
            BENCH, "collectives", "-b", "4K", "-e", "4K", "-n", "2", "-w", "1", "--schedule", "two_shot",
            "--no-baseline", "--compression", "bf16", "--rendezvous", f"file://{self.folder}/meet", "--json",
            "out.json"
        ]
        ranks = [
            subprocess.Popen(common, env=self.environment({"RANK": str(r), "WORLD_SIZE": "2"}),
                             cwd=self.folder, stdout=subprocess.PIPE, text=True) for r in range(2)
        ]
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0])
        self.assertIn("two_shot", outputs[0])
        self.assertEqual(outputs[1], "")
        rows = json.loads((self.folder / "out.json").read_text())
        self.check(rows, "tcp", 2)
        self.assertIsNone(rows[0]["baseline_time_us"])

    def test_a_rank_that_never_comes(self):
        result = self.run_bench("collectives", "--timeout-s", "1", "--rendezvous",
                                f"file://{self.folder}/meet", env={"RANK": "0", "WORLD_SIZE": "2"})
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
        self.assertIn("rank 1", result.stderr)

    def test_bad_input(self):
        if not pathlib.Path("/dev/nvidia0").exists():
            self.refuse(["collectives", "--transport", "nccl"], "cuda")
        self.refuse(["collectives", "-b", "1M", "-e", "4K"], "-e 4K", "-b 1M")
        self.refuse(["collectives", "--schedule", "star"], "star", "hierarchical")
        self.refuse(["collectives", "--schedule", "nccl", "--compression", "bf16"], "add --compression fp32")
        self.refuse(["collectives", "--schedule", "nccl"], "--transport local", "--transport nccl")
        self.refuse(["collectives", "--schedule", "hierarchical", "--ranks", "3"], "hierarchical", "3 ranks")
        self.refuse(["collectives", "--per-node", "3"], "--per-node 3", "4 ranks")
        self.refuse(["collectives", "--compression", "zip"], "unknown method 'zip'")
        self.refuse(["collectives", "--transport", "pigeon"], "pigeon", "local,tcp,nccl")
        self.refuse(["collectives", "--device", "cuda"], "--device cuda", env={"CUDA_VISIBLE_DEVICES": ""})
        self.refuse(["collectives", "--transport", "local"], "--transport local", "WORLD_SIZE=2",
                    env={"RANK": "0", "WORLD_SIZE": "2"})
        for flag, value in (("-n", "0"), ("-w", "-1"), ("-f", "1"), ("-b", "two"), ("--ranks", "0")):
            self.refuse(["collectives", flag, value], value)


class ShapedLink(BenchTest):
    """bench/harness/shaped_link.sh needs root and network namespaces, and says so where it lacks them."""

    def link(self, *arguments, as_other=()):
        script = "bench/harness/shaped_link.sh"
        process = subprocess.Popen(
            [*(as_other + [script] if as_other else [ROOT / script]), *map(str, arguments)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(None))
        stdout, stderr = process.communicate(timeout=120)
        result = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        self.assertEqual(self.namespaces(process), [])
        return result

    def namespaces(self, process):
        if not shutil.which("ip"):
            return []
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if line.startswith(f"gwlink-{process.pid}-")]

    def refused(self, result, *parts):
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for part in ("shaped_link: ", *parts):
            self.assertIn(part, result.stderr)

    def test_bad_input(self):
        self.refused(self.link("--hosts", "4"), "no command")
        self.refused(self.link("--hosts", "many", "--", "true"), "--hosts many")
        self.refused(self.link("--speed", "1", "--", "true"), "--speed")
        self.refused(self.link("--rate"), "--rate needs a value")

    @unittest.skipUnless(os.geteuid() == 0, "dropping root needs root")
    def test_without_root_it_says_so(self):
        self.folder.chmod(0o755)
        self.refused(self.link("--", "true", as_other=as_user(65534, self.folder, ROOT)), "root")

    def test_hosts_see_each_other_at_the_rate_and_leave_nothing(self):
        result = self.link("--hosts", "2", "--rate", "200mbit", "--", BENCH, "collectives", "-b", "1M", "-e",
                           "1M", *QUICK, "--schedule", "ring", "--compression", "fp32", "--json",
                           self.folder / "out.json")
        if result.returncode == 2 and ("root" in result.stderr or "permit" in result.stderr
                                       or "iproute2" in result.stderr):
            print("shaped_link cannot run here:", result.stderr.strip())
            return
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        row = json.loads((self.folder / "out.json").read_text())[0]
        self.assertEqual((row["ranks"], row["wrong"]), (2, 0))
        # 200 Mb/s are 25 MB/s; an unshaped burst cannot speed up a megabyte by more than a third.
        self.assertLess(row["busbw_gbps"], 0.034)
        failed = self.link("--hosts", "2", "--", "sh", "-c",
                           'echo "I am $RANK of $WORLD_SIZE"; exit $((RANK * 7))')
        self.assertEqual(failed.returncode, 7)
        self.assertEqual(failed.stdout, "I am 0 of 2\n")
        self.assertIn("[host 1] I am 1 of 2", failed.stderr)
        script = subprocess.Popen([
            ROOT / "bench/harness/shaped_link.sh", "--hosts", "2", "--", "sh", "-c",
            "echo up; exec sleep 98765"
        ], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.assertEqual(script.stdout.readline(), "up\n")
        self.assertEqual(len(self.namespaces(script)), 3)
        script.terminate()
        self.assertEqual(script.wait(timeout=60), 143)
        script.stdout.close()
        self.assertEqual(self.namespaces(script), [])
        # No process that ran in them is left either.
        self.assertEqual(subprocess.run(["pgrep", "-f", "^sleep 98765$"], capture_output=True).stdout, b"")


class Numerics(BenchTest):
    def test_every_schedule_and_wire(self):
        rows, _ = self.rows("numerics", "--ranks", "2,4", "--elements", 500)
        cases = {(r["ranks"], r["schedule"], r["compression"]): r for r in rows}
        self.assertEqual(len(cases), len(rows))
        self.assertEqual(len(rows), (3 + 5) * 7)  # no nodes of 2 ranks in a world of 2
        self.assertEqual([cases[4, "ring", wire]["lossy_steps"] for wire in ("fp32", "bf16")], [0, 4])
        self.assertEqual(cases[4, "hierarchical,intra_node=fp32", "bf16"]["lossy_steps"], 2)
        for (_, _, wire), row in cases.items():
            self.assertLess(row["rel_error"], {"fp32": 1e-7, "bf16": 6e-3, "fp8": 1e-1,
                                               "int8": 3e-2}[wire.partition(":")[0]], row)

    def test_formats_of_ones_choice(self):
        rows, _ = self.rows("numerics", "--ranks", "2", "--elements", 500, "--spec", "int4:block=32",
                            "--spec", "eden:bits=1")
        self.assertEqual({r["compression"] for r in rows}, {"int4:block=32", "eden:bits=1"})
        self.assertEqual(len(rows), 3 * 2)

    def test_what_is_no_wire_format(self):
        self.refuse(["numerics", "--spec", "powersgd:rank=4"], "powersgd:rank=4", "wire format")
        self.refuse(["numerics", "--spec", "int5"], "int5", "int4")

    def test_too_many_ranks(self):
        self.refuse(["numerics", "--ranks", 66], "--ranks")


class Orthonormalize(BenchTest):
    def test_all_factors_of_a_model_next_to_qr(self):
        rows, out = self.rows("orthonormalize", "--model", "vit_tiny", "--device", "host", "--rank", 2,
                              "--rank", 4, "--steps", 2, "--baseline")
        self.assertEqual([row["rank"] for row in rows], [2, 4])
        for row in rows:
            self.assertEqual(
                list(row),
                ["model", "device", "rank", "matrices", "ms", "baseline", "baseline_ms", "speedup"])
            self.assertGreater(row["matrices"], 0)
            self.assertAlmostEqual(row["speedup"], row["baseline_ms"] / row["ms"])
        self.assertIn("linalg.qr", out)

    def test_bad_input(self):
        self.refuse(["orthonormalize", "--model", "vgg"], "'vgg'", "resnet50")
        self.refuse(["orthonormalize", "--model", "vit_tiny", "--rank", 64], "--rank 64", "vit_tiny",
                    "smaller")
        self.refuse(["orthonormalize", "--rank", 65], "--rank")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: bench_test.py PATH_OF_GRADWIRE_BENCH ROOT_OF_THE_SOURCES [unittest arguments]")
    BENCH, ROOT = os.path.abspath(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
    unittest.main()
