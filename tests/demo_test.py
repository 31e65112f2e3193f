#!/usr/bin/env python3
"""Compares README's table with docs/demo.json, the run behind them, and that run with the program.

demo_test.py GRADWIRE ROOT

Trains for a few steps: bytes and ratios must be equal and, on a processor with the same features, the losses
to the last digit. With GRADWIRE_FULL_SWEEPS=1, trains like `make demo` but without links, which change no
bits, and compares the accuracies.
"""
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import unittest

PROGRAM, ROOT = "", pathlib.Path()


class Demo(unittest.TestCase):
    def setUp(self):
        sys.path.insert(0, str(ROOT / "bench/harness"))
        self.addCleanup(sys.path.pop, 0)
        import demo
        self.demo = demo
        demo.PROGRAM = PROGRAM
        self.record = json.loads((ROOT / "docs/demo.json").read_text())

    def compare(self, *flags):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            done = subprocess.run([PROGRAM, "compare", *flags, "--json", folder / "out.json"],
                                  capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            rows = json.loads((folder / "out.json").read_text())
            for row in rows:
                lines = (folder / row["seeds"][0]["log"]).read_text().splitlines()
                row["losses"] = [json.loads(line)["loss"] for line in lines if '"type":"step"' in line]
            return rows

    def test_readme_has_the_tables_of_the_record(self):
        block = self.demo.BLOCK.search((ROOT / "README.md").read_text())
        self.assertEqual(block[0], self.demo.text_of(self.record), "make demo-readme writes both")

    def test_the_tables_of_ddp_at_1_gigabit_have_the_medians_of_the_raw_data(self):
        modes, figures = collections.defaultdict(list), {}
        for item in json.loads((ROOT / "docs/results/2026-11-23-ddp/speed.json").read_text())["items"]:
            modes[item["mode"]].append(item)
        for mode, items in modes.items():
            ms = statistics.median(statistics.median(item["step_ms"]) for item in items)
            base = figures[next(iter(modes))][3] if figures else ms
            sent = statistics.median(item["sent_bytes"] for item in items)
            figures[mode] = (f"{sent / 1e6:.1f}", f"{ms:.0f}", f"{base / ms:.2f}", ms)
        names = {"PyTorch, no hook": "PyTorch, fp32", "PyTorch, FP32": "PyTorch, fp32"}
        for page, count in (("README.md", 7), ("docs/for-pytorch.md", len(figures))):
            lines = (ROOT / page).read_text().splitlines()
            first = next(at for at, line in enumerate(lines) if "ms per step |" in line)
            for line in lines[first + 2:first + 2 + count]:
                name, *cells = (cell.strip(" *x") for cell in line.replace("`", "").split("|")[1:5])
                name = names.get(name, name.removeprefix("Gradwire "))
                cells = cells[::-1] if page == "README.md" else cells
                self.assertEqual(tuple(cells[:3]), figures[name][:3], f"{page}: {name}")

    def test_compression_pays_on_the_slow_link_only(self):
        fp32, *others = self.record["links"]
        self.assertEqual(fp32["compression"], "fp32")
        for row in others:
            self.assertLess(row["seconds_to_target"], fp32["seconds_to_target"], row["compression"])
        self.assertIn("Between threads of one machine, compression does not pay",
                      self.demo.text_of(self.record))

    def test_the_program_sends_the_same_bytes_and_computes_the_same_losses(self):
        full = os.environ.get("GRADWIRE_FULL_SWEEPS")
        # Until the end of the warm-up, the learning rate does not depend on the length of the run.
        rows = self.compare(*self.demo.RUN) if full else self.compare(
            *self.demo.without_epochs(self.demo.RUN), "--steps", str(self.demo.WARMUP), "--eval-every", "0")
        same_machine = self.demo.machine() == self.record["machine"]
        for row, of_record in zip(rows, self.record["links"]):
            self.assertEqual(row["compression"], of_record["compression"])
            self.assertEqual((row["wire_bytes"], row["ratio"]),
                             (of_record["wire_bytes"], of_record["ratio"]))
            if same_machine:
                self.assertEqual(row["losses"][:self.demo.WARMUP:10], of_record["losses"])
            if same_machine and full:
                self.assertEqual(f"{row['test_accuracy']:.4f}", f"{of_record['test_accuracy']:.4f}")
        if not same_machine:
            print(f"accuracy not compared: {self.demo.machine()} here, {self.record['machine']} in the record")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: demo_test.py GRADWIRE ROOT_OF_THE_SOURCES [unittest arguments]")
    PROGRAM, ROOT = os.path.abspath(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1)).resolve()
    sys.dont_write_bytecode = True
    unittest.main()
