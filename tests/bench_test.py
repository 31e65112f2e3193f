#!/usr/bin/env python3
"""Tests the output, the files and the rejection of bad input of gradwire-bench's measurements of one
process."""
import json
import pathlib
import re
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cli"))
from bench import TIMING_FIELDS, BenchTest, compressions, main  # noqa: E402


class Output(BenchTest):
    def test_unwritable_json(self):
        for command in ("kernels", "formats", "hook", "collectives", "orthonormalize", "step"):
            result = self.run_command(command, "--json", "none/out.json")
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("none/out.json", result.stderr)


class Step(BenchTest):
    def test_a_world_of_one_in_three_ways(self):
        rows, out = self.rows("step", "--device", "host", "--batch-size", 1, "--compression",
                              "powersgd:rank=2", "--stop", "10ms")
        self.assertEqual(
            set(rows[0]), {
                "model", "device", "batch_size", "compression", "rounds", "reducer_ms", "bypassed_ms",
                "graph_ms", "reducer_ratio", "graph_ratio", "reducer", "bypassed", "graph"
            })
        for way in ("reducer", "bypassed", "graph"):
            self.check_timing(rows[0][way])
        self.assertGreaterEqual(rows[0]["rounds"], 3)
        self.assertIn("vit_tiny", out)

    def test_bad_input(self):
        self.refuse("step --model vit", "unknown model 'vit'")
        self.refuse("step --batch-size 0", "--batch-size")
        self.refuse("step --compression zip", "unknown method 'zip'")


class Kernels(BenchTest):
    def test_every_op_has_a_case(self):
        declared = set()
        for header in (self.root / "kernels").rglob("*.h"):
            declared |= set(re.findall(r"^GW_(?:TYPED_)?OP\((\w+),", header.read_text(), re.M))
        blocks = (self.root / "kernels/wire/block_formats.h").read_text()
        declared |= {name + op for name in re.findall(r"\bFORMAT\(\w+, (\w+)\)", blocks)
                     for op in ("_reduce_encode", "_decode")}
        self.assertIn("bf16_reduce_encode", declared)
        listed = self.run_command("kernels", "--list").stdout.splitlines()
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(declared, {line.split()[0] for line in listed})

    def test_every_case_runs_and_is_measured(self):
        listed = self.run_command("kernels", "--list").stdout.splitlines()
        rows, out = self.rows("kernels", "--device", "host", "--max-size", "64K", "--stop", "0.1ms",
                              "--cache", "warm")
        name = lambda r: r["op"] + (f" ({r['variant']})" if r["variant"] else "")
        self.assertEqual([name(r) for r in rows[::2]], listed)
        for row in rows:
            self.assertEqual(
                set(row), {
                    "op", "variant", "family", "device", "size_bytes", "shape", "cache", "bytes", "gbps",
                    "copy_gbps", "copy_fraction", "gflops", *TIMING_FIELDS
                })
            self.check_timing(row)
            self.assertGreaterEqual(row["n"], 3)
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
                            "--stop", "0.1ms")
        self.assertEqual({r["op"] for r in rows}, {"fp8_decode", "mxfp8_decode", "pack"})
        self.assertEqual({r["size_bytes"] for r in rows}, {1024, 2000})
        self.assertEqual({r["device"] for r in rows}, {"host, 1 thread"})
        self.assertEqual({r["cache"] for r in rows}, {"cold", "warm"})
        self.assertEqual({r["bytes"]
                          for r in rows if r["op"] == "fp8_decode"}, {5.0078125 * 256, 5.0078125 * 500})

    def test_bad_input(self):
        self.refuse("kernels --filter zip", "zip", "--list")
        self.refuse("kernels --filter pack --filter bf16_encode", "bf16_encode", "--list")
        self.refuse("kernels --device tpu", "tpu", "auto, host, cuda")
        self.refuse("kernels --device cuda", "--device cuda", "--device host",
                    env={"CUDA_VISIBLE_DEVICES": ""})
        self.refuse("kernels --min-size 1M --max-size 4K", "--max-size 4K", "--min-size 1M")
        self.refuse("kernels --max-size 64G", "--max-size 64G", "too large")
        self.refuse("kernels --max-size huge", "--max-size")
        self.refuse("kernels --threads 0", "--threads")
        self.refuse("kernels --cache hot", "--cache", "hot")
        for wrong in ("lots", "12M", "4095"):
            self.refuse("kernels", f"GRADWIRE_BENCH_FLUSH_BYTES={wrong}", "4096",
                        env={"GRADWIRE_BENCH_FLUSH_BYTES": wrong})


QUICK_FORMATS = ["--size", "64K", "--stop", "0.1ms"]


class Formats(BenchTest):
    def measured(self, *arguments):
        rows, out = self.rows("formats", *QUICK_FORMATS, *arguments)
        for row in rows:
            self.assertEqual(list(row), [
                "spec", "bytes_per_element", "stated_error", "on", "device", "speed_bytes",
                "encode_copy_fraction", "decode_copy_fraction", "copy_gbps", "encode", "decode"
            ])
            for op in ("encode", "decode"):
                if row[op] is not None:
                    self.check_timing(row[op])
            self.assertEqual(row["encode_copy_fraction"] is None, row["spec"] == "fp32")
        return {row["spec"]: row for row in rows}, out

    def test_the_formats_page_has_the_table_of_formats(self):
        table = self.run_command("formats", "--list").stdout
        self.assertIn("| `bf16` | 2 |", table)
        self.assertIn(table, (self.root / "docs/formats.md").read_text())

    def test_every_format_has_the_error_that_it_states(self):
        rows, out = self.measured("--rows", 4, "--elements", 16384, "--draws", 2)
        listed = re.findall(r"^\| `(\w+)(\S*)` \|", self.run_command("formats", "--list").stdout, re.M)
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
        """Writes tensors, a map from name to floats, as a safetensors file."""
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
        off = 1 + 2.0 ** -9  # BF16 rounds the value to 1
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
    "baseline_ms", "speedup", *TIMING_FIELDS
]


class Hook(BenchTest):
    def hook(self, *arguments, **kwargs):
        rows, out = self.rows("hook", "--model", "vit_tiny", "--device", "host", "--stop", 2, *arguments,
                              **kwargs)
        for row in rows:
            self.assertEqual(list(row), HOOK_FIELDS)
            self.assertEqual((row["device"], row["model"]), ("host", "vit_tiny"))
            self.assertAlmostEqual(row["ms"], row["median_us"] / 1e3)
            self.assertEqual((row["n"], row["stop"], row["stopped"]), (2, "2", "samples"))
            self.check_timing(row)
        return {row["spec"]: row for row in rows}, out

    def test_every_kind_of_spec(self):
        specs = [
            "fp32", "bf16", "bf16:ef=off", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16",
            "powersgd:rank=2,ef=off", "powersgd:rank=2,alternate=on", "randk:ratio=0.01",
            "randk:ratio=0.01,ef=off"
        ]
        rows, _ = self.hook(*compressions(*specs))
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
        # The extra bytes are the residual (a float per element, and gaps that align tensors) and the wire's
        # staging.
        self.assertGreaterEqual(rows["bf16"]["extra_bytes"], 6 * elements)
        self.assertLess(rows["bf16"]["extra_bytes"], 6.1 * elements)
        self.assertGreater(rows["powersgd:rank=2"]["extra_bytes"], 4 * elements)
        self.assertLess(rows["powersgd:rank=2,ef=off"]["extra_bytes"], elements)
        self.assertLess(rows["randk:ratio=0.01"]["extra_bytes"], 4.5 * elements)

    def test_pytorch_in_the_same_run(self):
        rows, out = self.hook("--baseline", *compressions("powersgd:rank=2", "bf16", "fp8"))
        for spec, hook in (("powersgd:rank=2", "powerSGD_hook rank 2"), ("bf16", "bf16_compress_hook")):
            self.assertRegex(rows[spec]["baseline"], "^torch .* " + hook)
            self.assertAlmostEqual(rows[spec]["speedup"], rows[spec]["baseline_ms"] / rows[spec]["ms"])
        self.assertIsNone(rows["fp8"]["baseline"])  # PyTorch has no FP8 baseline
        self.assertIn("powerSGD_hook", out)

    def test_model_sizes(self):
        for model, elements in (("resnet18", 11_689_512), ("resnet50", 25_557_032)):
            rows, _ = self.rows("hook", "--model", model, "--device", "host", "--stop", 1, "--compression",
                                "fp32")
            self.assertEqual(rows[0]["elements"], elements)

    def test_bad_input(self):
        small = ["hook", "--model", "vit_tiny", "--device", "host"]
        self.refuse("hook --model vgg", "'vgg'", "resnet50", "vit_l_32")
        self.refuse([*small, "--compression", "zip"], "unknown method 'zip'")
        self.refuse([*small, "--stop", "0"], "--stop 0")
        self.refuse([*small, "--baseline", "--python", "/nowhere/python"], "/nowhere/python", "No such file")
        python = self.folder / "python"
        python.write_text("#!/bin/sh\necho '{\"missing\": \"No module named torch\"}'\n")
        python.chmod(0o755)
        self.refuse([*small, "--baseline", "--python", python], "No module named torch", "python3-torch")

    def test_a_baseline_that_dies_is_an_error(self):
        python = self.folder / "python"
        python.write_text("#!/bin/sh\necho 'that hurt' >&2\nexit 3\n")
        python.chmod(0o755)
        result = self.run_command("hook", "--model", "vit_tiny", "--device", "host", "--baseline", "--python",
                                python)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
        self.assertIn("that hurt", result.stderr)


class Orthonormalize(BenchTest):
    def test_all_factors_of_a_model_next_to_qr(self):
        rows, out = self.rows("orthonormalize", "--model", "vit_tiny", "--device", "host", "--rank", 2,
                              "--rank", 4, "--stop", 2, "--baseline")
        self.assertEqual([row["rank"] for row in rows], [2, 4])
        for row in rows:
            self.assertEqual(
                list(row),
                ["model", "device", "rank", "matrices", "ms", "baseline", "baseline_ms", "speedup",
                 *TIMING_FIELDS])
            self.check_timing(row)
            self.assertGreater(row["matrices"], 0)
            self.assertAlmostEqual(row["speedup"], row["baseline_ms"] / row["ms"])
        self.assertIn("linalg.qr", out)

    def test_bad_input(self):
        self.refuse("orthonormalize --model vgg", "'vgg'", "resnet50")
        self.refuse("orthonormalize --model vit_tiny --rank 64", "--rank 64", "vit_tiny", "smaller")
        self.refuse("orthonormalize --rank 513", "--rank")


if __name__ == "__main__":
    main()
