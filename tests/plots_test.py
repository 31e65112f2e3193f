#!/usr/bin/env python3
"""Tests bench/plots/plot.py on a comparison: which picture the script draws, and which specs are on the
Pareto front."""
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path()  # argument of the command line


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
class Plots(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-plots-"))
        self.addCleanup(shutil.rmtree, self.folder)
        sys.path.insert(0, str(ROOT / "bench"))
        self.addCleanup(sys.path.pop, 0)
        sys.dont_write_bytecode = True
        from plots import by_ranks, pareto, plot
        self.by_ranks, self.pareto, self.plot = by_ranks, pareto, plot

    def row(self, name, bytes_per_element, accuracy, seeds=1, log="out.0.jsonl"):
        return {"compression": name, "wire_bytes_per_element": bytes_per_element, "test_accuracy": accuracy,
                "test_accuracy_std": 0.01 if seeds > 1 else None, "ranks": 4, "device": "host",
                "seeds": [{"seed": s, "test_accuracy": accuracy, "log": log} for s in range(seeds)]}

    def front(self, *rows):
        return [p.name for p in self.pareto.pareto_front(self.pareto.points_of(list(rows)))]

    def test_the_front_is_what_nothing_beats_with_as_few_bytes(self):
        self.assertEqual(self.front(self.row("fp32", 4, 0.90), self.row("a", 1, 0.88), self.row("b", 1, 0.89),
                                    self.row("c", 2, 0.89), self.row("d", 0.1, 0.5), self.row("e", 3, 0.95)),
                         ["d", "b", "e"])
        self.assertEqual(self.front(self.row("fp32", 4, 0.9), self.row("diverged", 1, None)), ["fp32"])
        with self.assertRaisesRegex(SystemExit, "nothing was sent"):
            self.front(self.row("fp32", 0, 0.9))

    def test_many_specs_or_seeds_are_points_and_few_are_lines(self):
        few = [self.row("fp32", 4, 0.9)]
        self.assertFalse(self.plot.draws_pareto(few, False))
        self.assertTrue(self.plot.draws_pareto(few, True))
        self.assertTrue(self.plot.draws_pareto(few * 8, False))
        self.assertTrue(self.plot.draws_pareto([self.row("fp32", 4, 0.9, seeds=2)], False))

    def test_plans_have_a_line_per_spec_with_its_fastest_schedule(self):
        files = []
        for ranks in (8, 16):
            rows = [{"compression": spec, "schedule": schedule, "speed": speed} for spec, schedule, speed in (
                ("fp32", "nccl", 1), ("bf16", "ring", 1.5), ("bf16", "tree", 1.25))]
            files.append(self.folder / f"plan-{ranks}.json")
            files[-1].write_text(json.dumps({"cluster": "a cluster", "ranks": ranks, "model": "vit_tiny",
                                             "batch_size": 8, "rows": rows}))
        plans = [self.plot.document_of(str(file)) for file in files]
        self.assertEqual(self.plot.kind_of(plans), "plans")
        self.assertEqual(self.by_ranks.best_speeds(plans[0]), {"fp32": 1, "bf16": 1.5})
        self.by_ranks.draw_plans(plans, self.folder / "plan.png")
        self.assertGreater((self.folder / "plan.png").stat().st_size, 10000)
        self.assertEqual(self.plot.kind_of([plans[0], self.plot.document_of(str(self.folder / "plan.png"))]),
                         "runs")

    def test_both_pictures_are_drawn_from_the_logs_that_the_table_names(self):
        records = [{
            "type": "run", "compression": "bf16", "model": {"name": "vit_tiny"}, "data": "synthetic:64",
            "ranks": 4, "device": "host", "batch_size": 8, "steps": 2, "schedule": "ring"}]
        records += [{"type": "step", "step": s, "loss": 2 - s, "step_ms": 10, "wire_bytes": 100}
                    for s in range(2)]
        records += [{"type": "eval", "step": 2, "test_accuracy": 0.9}, {"type": "summary", "ratio": 2.0}]
        (self.folder / "out.5.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        # The plot marks the accuracies of a run that failed to learn at the border.
        rows = [self.row("bf16", 2, 0.9, 2, "out.5.jsonl"), self.row("int8", 1, 0.89, 2, "out.5.jsonl"),
                self.row("sign:round=stochastic", 0.1, 0.2, 2, "out.5.jsonl")]
        for name, table in (("points", rows), ("lines", [self.row("bf16", 2, 0.9, 1, "out.5.jsonl")])):
            (self.folder / "out.json").write_text(json.dumps(table))
            drawn = subprocess.run([
                sys.executable, ROOT / "bench/plots/plot.py", self.folder / "out.json", "-o",
                self.folder / f"{name}.png"], capture_output=True, text=True, timeout=120)
            self.assertEqual((drawn.returncode, drawn.stderr), (0, ""))
            self.assertGreater((self.folder / f"{name}.png").stat().st_size, 10000)
        self.assertNotEqual((self.folder / "points.png").read_bytes(),
                            (self.folder / "lines.png").read_bytes())

    def test_a_python_without_matplotlib_is_named(self):
        plot = subprocess.run([sys.executable, "-S", ROOT / "bench/plots/plot.py", "x.json"], text=True,
                              capture_output=True)  # -S: without Debian's packages
        self.assertRegex(plot.stderr, f"^plot.py: {sys.executable} has no matplotlib; .*matplotlib")

    def test_over_links_the_times_to_the_target_are_marked_and_no_text_lies_on_another_or_on_a_line(self):
        from plots import runs
        table = []
        for name, ms, sent in (("fp32", 75, 1230384), ("int8", 24, 309987), ("powersgd:rank=4", 10, 33000)):
            records = [{"type": "run", "compression": name, "model": {"name": "vit_tiny"}, "ranks": 4,
                        "data": "synthetic", "device": "host", "batch_size": 8, "steps": 60,
                        "schedule": "ring", "link": "150Mbit"}]
            for s in range(60):
                records += [{"type": "eval", "step": s, "test_accuracy": 0.8 * s / 60}] * (s % 6 == 0)
                records.append({"type": "step", "step": s, "loss": 1, "step_ms": ms, "wire_bytes": sent})
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
            table.append({**self.row(name, 4, 0.8, log=f"{name}.jsonl"), "target_accuracy": 0.6,
                          "seconds_to_target": 0.046 * ms})
        (self.folder / "out.json").write_text(json.dumps(table))
        figures = []
        self.addCleanup(setattr, runs, "finish", runs.finish)
        runs.finish = lambda figure, *_: figures.append(figure)
        runs.draw(runs.load([str(self.folder / "out.json")]), "unused")
        times, by_bytes, _ = figures[0].axes
        self.assertIn("150 Mbit/s", times.get_title(loc="left"))
        self.assertEqual(times.get_ylim(), by_bytes.get_ylim())
        self.assertEqual([t.get_text() for t in times.texts], ["0.5 s", "1.1 s", "3.4 s"])
        for axis in (times, by_bytes):
            boxes = [text.get_window_extent(axis.figure.canvas.get_renderer()) for text in axis.texts]
            points = [p for line in axis.lines for p in axis.transData.transform(line.get_xydata())
                      if line.get_linestyle() == "-"]
            for i, box in enumerate(boxes):
                self.assertFalse(any(box.overlaps(other) for other in boxes[:i]))
                self.assertFalse(any(box.contains(*p) for p in points))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: plots_test.py ROOT_OF_THE_SOURCES [unittest arguments]")
    ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
