#!/usr/bin/env python3
"""Tests gradwire-bench's measurements of one process: output, stop rule, files, comparison, and refused input."""
import csv
import json
import pathlib
import re
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cli"))
from bench import BenchTest, compressions, main  # noqa: E402


class Step(BenchTest):
    def test_a_world_of_one_in_three_ways(self):
        rows, out = self.rows("step", "--device", "host", "--batch-size", 1, "--compression",
                              "powersgd:rank=2", "--stop", "10ms")
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
            declared |= set(re.findall(r"^(?:GW_(?:TYPED_)?OP|  (?:OP|PASS|FUSED|BY_HAND))\((\w+), \w+",
                                       header.read_text(), re.M))
        blocks = (self.root / "kernels/wire/block_formats.h").read_text()
        declared |= {name + op for name in re.findall(r"\bFORMAT\(\w+, (\w+)\)", blocks)
                     for op in ("_reduce_encode", "_decode")}
        self.assertIn("bf16_reduce_encode", declared)
        listed = self.run_command("kernels", "--list").stdout.splitlines()
        self.assertEqual(len(listed), len(set(listed)))
        cases = {line.split()[0] for line in listed}
        self.assertEqual(sorted(declared - cases), [], "add a case for each to bench/cases/kernel_cases*.cpp")
        self.assertEqual(sorted(cases - declared), [], "no header of kernels/ declares these")

    def test_every_case_runs_and_is_measured(self):
        listed = self.run_command("kernels", "--list").stdout.splitlines()
        rows, out = self.rows("kernels", "--device", "host", "--max-size", "64K", "--stop", "0.1ms",
                              "--cache", "warm")
        name = lambda r: r["op"] + (f" ({r['variant']})" if r["variant"] else "")
        self.assertEqual([name(r) for r in rows[::2]], listed)
        for row in rows:
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
            self.assertEqual(row["encode_copy_fraction"] is None, row["spec"] == "fp32")
        return {row["spec"]: row for row in rows}, out

    def test_the_formats_page_has_the_table_of_formats(self):
        table = self.run_command("formats", "--list").stdout
        self.assertIn("| `bf16` | 2 |", table)
        there = (self.root / "docs/formats.md").read_text()
        missing = [row for row in table.splitlines() if f"{row}\n" not in there]
        if missing or table not in there:
            self.fail("docs/formats.md lacks the table of gradwire-bench formats --list. Rows to add or "
                      "replace:\n" + ("\n".join(missing) or "none: their order differs"))
        for page in ("docs/numerics.md", "docs/results/formats.md"):  # NaN, infinity; measured errors
            text = (self.root / page).read_text()
            for name in re.findall(r"^\| `(\w+)` \|", table, re.M):
                self.assertIn(name, text, f"{page} does not say what holds for the format {name}")

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
            header[tensor] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(data),
                                                                                       len(data) + len(raw)]}
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


class Hook(BenchTest):
    def hook(self, *arguments, **kwargs):
        rows, out = self.rows("hook", "--model", "vit_tiny", "--device", "host", "--stop", 2, *arguments,
                              **kwargs)
        for row in rows:
            self.assertEqual((row["device"], row["model"]), ("host", "vit_tiny"))
            self.assertAlmostEqual(row["ms"], row["median_us"] / 1e3)
            self.assertEqual((row["n"], row["stop"], row["stopped"]), (2, "2", "samples"))
        return {row["spec"]: row for row in rows}, out

    def test_every_kind_of_spec(self):
        specs = ["fp32", "bf16", "bf16:ef=off", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16",
                 "powersgd:rank=2,ef=off", "powersgd:rank=2,alternate=on", "randk:ratio=0.01",
                 "randk:ratio=0.01,ef=off"]
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

    def test_bad_input_and_a_baseline_that_dies(self):
        small = ["hook", "--model", "vit_tiny", "--device", "host"]
        self.refuse("hook --model vgg", "'vgg'", "resnet50", "vit_l_32")
        self.refuse([*small, "--compression", "zip"], "unknown method 'zip'")
        self.refuse([*small, "--baseline", "--python", "/nowhere/python"], "/nowhere/python", "No such file")
        python = self.folder / "python"
        python.write_text("#!/bin/sh\necho '{\"missing\": \"No module named torch\"}'\n")
        python.chmod(0o755)
        self.refuse([*small, "--baseline", "--python", python], "No module named torch", "python3-torch")
        python.write_text("#!/bin/sh\necho 'that hurt' >&2\nexit 3\n")
        result = self.run_command(*small, "--baseline", "--python", python)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
        self.assertIn("that hurt", result.stderr)


class Orthonormalize(BenchTest):
    def test_all_factors_of_a_model_next_to_qr(self):
        rows, out = self.rows("orthonormalize", "--model", "vit_tiny", "--device", "host", "--rank", 2,
                              "--rank", 4, "--stop", 2, "--baseline")
        self.assertEqual([row["rank"] for row in rows], [2, 4])
        for row in rows:
            self.assertGreater(row["matrices"], 0)
            self.assertAlmostEqual(row["speedup"], row["baseline_ms"] / row["ms"])
        self.assertIn("linalg.qr", out)

    def test_bad_input(self):
        self.refuse("orthonormalize --model vgg", "'vgg'", "resnet50")
        self.refuse("orthonormalize --model vit_tiny --rank 64", "--rank 64", "vit_tiny", "smaller")
        self.refuse("orthonormalize --rank 513", "--rank")


KERNEL = ["kernels", "--device", "host", "--threads", 1, "--filter", "fp8_decode", "--min-size", "4K",
          "--max-size", "4K", "--cache", "warm"]


class StopRules(BenchTest):
    def test_what_ends_a_measurement(self):
        for stop, n, text, stopped in (
                ("7", 7, "7", "samples"),
                ("0s", 3, "0s", "time"),  # three samples at the earliest
                ("error=100%,samples=12,min=0s", 12, "error=100%,samples=12,min=0s,max=15s", "error"),
                ("error=0%,max=1ms", None, "error=0%,samples=10,min=1ms,max=1ms", "time")):
            row = self.rows(*KERNEL, "--stop", stop)[0][0]
            self.assertEqual((row["n"], row["stop"], row["stopped"]), (n or row["n"], text, stopped))

    def test_rules_that_are_not_rules(self):
        for stop in ("soon", "", "0", "error=1", "error=1%,", "samples=2", "max=5", "min=2s,max=1s",
                     "error=101%", "1e9s"):
            self.refuse([*KERNEL, "--stop", stop], f"--stop {stop}: ", "error=0.5%,samples=10")
        for command in (["formats"], ["hook", "--model", "vit_tiny"], ["orthonormalize"], ["step"]):
            self.refuse([*command, "--stop", "soon"], "--stop soon: 'soon'")


class Files(BenchTest):
    def test_csv_and_markdown_have_the_rows_of_the_json_file(self):
        rows, _ = self.rows(*KERNEL, "--stop", 3, "--csv", "out.csv", "--markdown", "out.md")
        with open(self.folder / "out.csv", newline="") as file:
            table = list(csv.DictReader(file))
        self.assertEqual(len(table), len(rows))
        self.assertEqual(list(table[0]), list(rows[0]))
        self.assertEqual(float(table[0]["median_us"]), rows[0]["median_us"])
        self.assertEqual(table[0]["shape"], rows[0]["shape"])
        self.assertEqual(table[0]["sm_mhz"], "")  # a host
        heading, rule, *lines = (self.folder / "out.md").read_text().splitlines()
        self.assertEqual([cell.strip() for cell in heading.strip("|").split("|")], list(rows[0]))
        self.assertEqual(rule, "|---" * len(rows[0]) + "|")
        self.assertEqual(len(lines), len(rows))

    def test_fields_of_objects_have_the_name_of_the_object(self):
        self.rows("formats", "--spec", "fp32", "--spec", "bf16", "--size", "64K", "--stop", 3, "--rows", 1,
                  "--elements", 128, "--csv", "out.csv")
        with open(self.folder / "out.csv", newline="") as file:
            exact, rounded = csv.DictReader(file)
        self.assertEqual((exact["spec"], exact["encode.n"], rounded["encode.n"]), ("fp32", "", "3"))

    def test_a_killed_benchmark_keeps_its_rows_and_has_said_how_long_it_takes(self):
        files = [self.folder / f"out.{kind}" for kind in ("json", "csv", "md")]
        files[0].write_text("an older result")
        with subprocess.Popen([self.program, "kernels", "--device", "host", "--max-size", "4K", "--cache",
                               "warm", "--stop", "1s", "--json", files[0], "--csv", files[1], "--markdown",
                               files[2]],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=self.environment()) as process:
            estimate = process.stderr.readline()  # after 5 s of about 300
            process.kill()
            shown = [line for line in process.stdout if " 4K " in line]
        self.assertEqual(files[0].read_text(), "an older result")
        files = [path.with_name(path.name + ".part") for path in files]
        self.assertRegex(estimate, r"^gradwire-bench: case \d+ of \d+, about \d+:\d\d left$")
        self.assertGreaterEqual(len(shown), 2)
        self.assertIn(len(json.loads(files[0].read_text())), (len(shown), len(shown) - 1))
        self.assertIn(len(files[1].read_text().splitlines()) - 1, (len(shown), len(shown) - 1))
        self.assertIn(len(files[2].read_text().splitlines()) - 2, (len(shown), len(shown) - 1))

    def test_unwritable_files(self):
        for flag in ("--csv", "--markdown"):
            self.refuse([*KERNEL, flag, "none/out"], "none/out")
        for command in ("kernels", "formats", "hook", "collectives", "orthonormalize", "step"):
            self.assert_refused(self.run_command(command, "--json", "none/out.json"), "none/out.json")


def row(op, least, q3, sm_mhz=None, **more):
    """Returns a row with the interval [least, q3]."""
    width = q3 - least
    return {"op": op, "variant": "", "device": "host", "size_bytes": 4096, "n": 10, "min_us": least,
            "q1_us": least + width / 3, "median_us": least + 2 * width / 3, "q3_us": q3, "sm_mhz": sm_mhz,
            **more}


class Compare(BenchTest):
    def write(self, name, content):
        (self.folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def verdicts(self, before, after, *flags):
        """Returns the exit code, and the verdict on each row."""
        self.write("a.json", before)
        self.write("b.json", after)
        result = self.run_command("compare", "a.json", "b.json", "--json", "out.json", *flags)
        self.assertEqual(result.stderr, "")
        return result.returncode, [r["verdict"] for r in self.written()], result.stdout

    def test_intervals_decide(self):
        for interval, verdict in (((100, 102), "SAME"), ((100.5, 102.5), "SAME"), ((90, 98), "FASTER"),
                                  ((103.5, 110), "SLOWER"), ((102.5, 110), "UNSURE"),  # a gap of 0.5 %
                                  ((90, 99.5), "UNSURE"), ((101.5, 104), "UNSURE"),  # hardly overlap
                                  ((99, 130), "UNSURE")):  # too much noise
            code, verdicts, out = self.verdicts([row("x", 100, 102)], [row("x", *interval)])
            self.assertEqual((code, verdicts), (1 if verdict == "SLOWER" else 0, [verdict]), interval)
            self.assertIn(f"1 {verdict}", out)
            if verdict == "UNSURE":
                self.assertIn("UNSURE: ", out)  # the reason
        code, verdicts, out = self.verdicts([row("x", 100, 102)], [row("x", 200, 202, n=9)])
        self.assertEqual((code, verdicts), (0, ["UNSURE"]))
        self.assertIn("9 samples", out)

    def test_one_slower_row_fails(self):
        before = [row(op, 100, 102) for op in "abc"]
        after = [row("a", 100, 102), row("b", 120, 122), row("c", 50, 51)]
        self.assertEqual(self.verdicts(before, after)[:2], (1, ["SAME", "SLOWER", "FASTER"]))

    def test_the_minima_of_several_runs_decide(self):
        def compared(before, after):
            for name, minima in (("a", before), ("b", after)):
                for i, least in enumerate(minima):  # other work lengthened the rest of each run
                    self.write(f"{name}{i}.json", [row("x", least, 3 * least)])
            a, b = (",".join(f"{name}{i}.json" for i in range(len(minima)))
                    for name, minima in (("a", before), ("b", after)))
            result = self.run_command("compare", a, b, "--json", "out.json")
            return result.returncode, self.written()[0]["verdict"]

        self.assertEqual(compared([100, 101, 100, 190], [100, 100, 180, 101]), (0, "UNSURE"))
        self.assertEqual(compared([100, 101, 100, 102], [101, 100, 102, 100]), (0, "SAME"))
        self.assertEqual(compared([100, 101, 100, 102, 100, 190], [111, 110, 190, 110]), (1, "SLOWER"))
        self.assertEqual(compared([100, 190, 190, 190], [110, 110, 190, 110]), (0, "UNSURE"))

    def test_a_gpus_clock_that_changed_is_no_regression(self):
        before = [row("x", 100, 102, 2000)]
        for interval, mhz, verdict in (((120, 122), 2000, "SLOWER"), ((120, 122), 1670, "UNSURE"),
                                       ((100, 102), 1500, "UNSURE"), ((100, 102), 1990, "SAME")):
            code, verdicts, out = self.verdicts(before, [row("x", *interval, mhz)])
            self.assertEqual((code, verdicts), (int(verdict == "SLOWER"), [verdict]), (interval, mhz))
        code, verdicts, out = self.verdicts(before, [row("x", 120, 122, 1670)])
        self.assertIn("SAME in cycles: the SM clock was 2000 and 1670 MHz", out)
        self.assertEqual(self.written()[0]["cycles"], "SAME")
        # Without the clock of both, time alone decides.
        self.assertEqual(self.verdicts(before, [row("x", 120, 122)])[:2], (1, ["SLOWER"]))

    def test_rows_match_by_what_identifies_them(self):
        before = [row("x", 100, 102), row("y", 100, 102)]
        after = [row("y", 100, 102), row("x", 120, 122), row("z", 1, 2)]
        code, verdicts, out = self.verdicts(before, after)
        self.assertEqual((code, verdicts), (1, ["SLOWER", "SAME"]))
        self.assertIn("only in b.json: 1 rows, such as z", out)
        larger = [row(op, 120, 122, size_bytes=8192) for op in "xy"]
        self.assertEqual(self.verdicts(before, larger, "--ignore", "size_bytes")[:2], (1, ["SLOWER"] * 2))

    def test_the_measurements_within_a_row(self):
        before = {"spec": "bf16", "encode": row("", 100, 102), "decode": row("", 50, 51)}
        after = {"spec": "bf16", "encode": row("", 100, 102), "decode": row("", 60, 61)}
        self.assertEqual(self.verdicts([before], [after])[:2], (1, ["SAME", "SLOWER"]))
        self.assertEqual([r["row"] for r in self.written()], ["bf16, encode", "bf16, decode"])

    def test_measured_results(self):
        self.rows(*KERNEL, "--stop", 5)
        path = self.folder / "out.json"
        path.rename(self.folder / "a.json")
        result = self.succeed("compare", "a.json", "a.json")
        self.assertIn("fp8_decode, host, 1 thread, size_bytes=4096", result.stdout)

    def test_bad_input(self):
        self.write("a.json", [row("x", 1, 2)])
        self.write("other.json", [row("y", 1, 2)])
        self.write("text.json", "hello")
        self.write("object.json", {"op": "x"})
        self.write("empty.json", [])
        self.write("untimed.json", [{"op": "x", "n": 3}])
        self.write("mixed.json", [row("x", 1, 2), 3])
        self.write("negative.json", [row("x", -1, 2)])
        self.write("word.json", [row("x", 1, 2, n="many")])
        self.write("zero.json", [row("x", 0, 0)])
        for words, *parts in (("a.json none.json", "none.json"), ("a.json text.json", "text.json: not JSON"),
                              ("object.json a.json", "object.json: not a list of rows"),
                              ("empty.json a.json", "empty.json: not a list of rows"),
                              ("untimed.json a.json", "untimed.json: no row has min_us"),
                              ("mixed.json a.json", "mixed.json: not a list of rows"),
                              ("negative.json a.json", "negative.json: min_us"),
                              ("word.json a.json", "word.json: n is not a number"),
                              ("zero.json a.json", "zero.json: median_us is 0"),
                              ("a.json,other.json a.json", "other.json: row 1 is not 'x, "),
                              ("a.json a.json,none.json", "none.json"),
                              ("a.json other.json", "no row in common", "'x, ", "'y, "),
                              ("a.json", "B is required"),
                              ("a.json a.json --ignore color", "--ignore color", "size_bytes")):
            self.refuse("compare " + words, *parts)


if __name__ == "__main__":
    main()
