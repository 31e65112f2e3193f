#!/usr/bin/env python3
"""Tests the arithmetic of bench/experiments, and bad input. Skips the measurements, which take minutes and of
which some need root."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path()  # argument of the command line


class Experiments(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-experiments-"))
        self.addCleanup(shutil.rmtree, self.folder)
        from harness import report, slow_links
        self.report, self.slow_links = report, slow_links

    def item(self, who, method, step_ms, bucket_mb=None, phase="main", network="shaped", **more):
        return {"who": who, "method": method, "phase": phase, "network": network, "bucket_mb": bucket_mb,
                **({"step_ms": step_ms} if step_ms else {}), **more}

    def result(self):
        items = [
            self.item("gradwire", "alone", [100]),
            self.item("pytorch", "alone", [120, 130, 110]),
            # The median of the repetitions' medians is 700.
            self.item("gradwire", "fp32", [690, 9000, 700]),
            self.item("gradwire", "fp32", [500, 600]),
            self.item("gradwire", "fp32", [900]),
            self.item("pytorch", "fp32", [710]),
            self.item("gradwire", "fp32", [650], 8),
            self.item("pytorch", "fp32", [640], 4),
            self.item("gradwire", "16bit", [350], 4),
            self.item("pytorch", "16bit", None, 4, error="it | aborted"),
            self.item("gradwire", "powersgd4", [160], wire_bytes=2e6),
            self.item("gradwire", "powersgd4", [140], 16, wire_bytes=1e6),
            self.item("pytorch", "powersgd4", [280])
        ]
        return self.slow_links.Result({"settings": {}, "items": items})

    def test_medians_ratios_and_the_better_kind_of_buckets(self):
        result = self.result()
        self.assertEqual(result.base("gradwire").ms, 700)
        self.assertEqual(result.alone("pytorch").ms, 120)
        self.assertAlmostEqual(result.share(), 6 / 7)
        table = {row[0] + " " + row[1]: row for row in self.slow_links.main_table(result)}
        self.assertEqual(table["PowerSGD rank 4 buckets of 16 MB"][2:],
                         ["140", "5.00x", "1.00", "one bucket", "280", "2.54x", "2.00x"])
        self.assertEqual(table["BF16 buckets of 4 MB"][2:],
                         ["350", "2.00x", "-", "buckets (FP16)", "fails", "-", "-"])
        self.assertEqual(table["FP32 buckets of 8 MB"][-1], "0.98x")
        self.assertNotIn("PowerSGD rank 1", " ".join(table))
        for row in self.slow_links.main_table(result):
            self.assertEqual(len(row), 9)
        self.assertEqual(self.slow_links.errors(result), ["PyTorch BF16, buckets: it | aborted"])

    def test_the_peers_16_bits_are_named_where_they_are_not_ours(self):
        for hook, buckets, compared in (("fp16", "one bucket (FP16)", "(FP16)"), ("bf16", "one bucket",
                                                                                  "(the same)")):
            result = self.slow_links.Result({"settings": {}, "items": [
                self.item("gradwire", "16bit", [100]), self.item("pytorch", "16bit", [150], hook=hook)]})
            self.assertEqual(self.slow_links.main_table(result)[1][5:7], [buckets, "150"])
            self.assertIn(f"PyTorch's {compared}", " ".join(self.slow_links.goal_lines(result)))

    def test_goals_say_met_not_met_and_not_measured(self):
        lines = self.slow_links.goal_lines(self.result())
        self.assertEqual([line.split("  ")[0].strip() for line in lines],
                         ["met", "not measured", "met", "met", "NOT MET", "met"], lines)
        self.assertIn("PowerSGD (rank 4), relative to own FP32 with one bucket", lines[2])
        self.assertIn("5.00x  (goal 5x)", lines[2])
        self.assertIn("0.98x  (goal 1x)", lines[4])
        nothing = self.slow_links.goal_lines(self.slow_links.Result({"settings": {}, "items": []}))
        self.assertEqual([line.split("  ")[0].strip() for line in nothing], ["not measured"] * 3)

    def test_the_sweep_chooses_by_medians_and_ignores_what_failed(self):
        items = [self.item("gradwire", "fp32", [30, 31, 90], 4, "sweep"),
                 self.item("gradwire", "fp32", [29, 40, 50], 8, "sweep"),
                 self.item("gradwire", "fp32", None, 2, "sweep", error="no")]
        self.assertEqual(self.slow_links.best_bucket_mb(items, "gradwire", "fp32", 16), 4)
        self.assertEqual(self.slow_links.best_bucket_mb(items, "pytorch", "fp32", 16), 16)
        one = [*items, self.item("gradwire", "fp32", [20], None, "sweep")]
        self.assertIsNone(self.slow_links.best_bucket_mb(one, "gradwire", "fp32", 16))
        self.assertEqual(
            self.slow_links.sweep_table(one),
            [["", "one bucket", "8 MB", "4 MB", "2 MB"], ["Gradwire FP32", "20", "40", "31", "-"]])
        self.assertEqual(self.slow_links.sweep_table(items)[1], ["Gradwire FP32", "40", "31", "-"])

    def test_a_log_without_its_warm_up(self):
        records = [{"type": "run", "buckets": 2, "schedule": "ring", "parameters": 10, "tensors": 3}]
        records += [{"type": "step", "step_ms": ms, "loss": ms / 10, "comm_ms": ms / 2}
                    for ms in (900, 10, 30, 20)]
        read = self.report.result_of(records, 1)
        self.assertEqual((read["step_ms"], read["loss"], read["comm_ms"], read["wire_bytes"]),
                         ([10, 30, 20], 2.0, 10.0, None))

    def test_accuracy_against_the_same_seed(self):
        from experiments import table
        items = [{"compression": spec, "seed": seed, "test_accuracy": value, "bytes": 1e9, "ratio": 2.0}
                 for spec, seed, value in (("fp32", 0, 0.88), ("fp32", 1, 0.90), ("bf16", 0, 0.881),
                                           ("bf16", 1, 0.894), ("powersgd:rank=4", 1, 0.89))]
        rows = {row["spec"]: row for row in table.accuracies(items)}
        self.assertEqual(list(rows), ["fp32", "bf16", "powersgd:rank=4"])
        self.assertAlmostEqual(sum(rows["bf16"]["differences"]), 0.001 - 0.006)
        self.assertEqual(len(rows["powersgd:rank=4"]["differences"]), 1)
        self.assertEqual([line.rsplit(", ", 1)[1] for line in table.accuracy_goals(rows.values())],
                         ["met", "NOT MET", "NOT MET"])
        self.assertEqual(len(table.accuracy_table(rows.values())), 4)

    def test_speeds_and_losses_relative_to_a_mode(self):
        times = (("a", [10, 30, 20]), ("b", [10]), ("a", [40]), ("b", [20]))
        items = [{"mode": mode, "step_ms": ms} for mode, ms in times]
        self.assertEqual(self.report.speed_table(items, "a", "none"),
                         [["", "ms", "x a", "x none", "range of repetitions, ms"],
                          ["a", "30.0", "1.00", "-", "20.0 to 40.0"],
                          ["b", "15.0", "2.00", "-", "10.0 to 20.0"]])
        items = [{"mode": mode, "optimizer": "sgd", "seed": seed, "final_loss": loss}
                 for mode, seed, loss in (("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 1.5), ("b", 1, 2.0))]
        self.assertEqual(self.report.loss_table(items, "a")[2],
                         ["b", "1.7500", "+0.2500", "+0.5000, +0.0000"])

    def test_goals_compare_graphs_with_captured_steps(self):
        from experiments import gpu_training
        ms = {"Gradwire --graph": 10, "PyTorch eager, captured": 12, "torch.compile, captured": 11,
              "PyTorch eager": 70, "torch.compile": 40}
        rows = [{"who": who, "precision": "bf16", "step_ms": [value]} for who, value in ms.items()]
        self.assertEqual(gpu_training.goal_lines(rows),
                         ["bf16: 1.20x of PyTorch eager, captured's steps/s (goal 1x): met",
                          "bf16: 1.10x of torch.compile, captured's steps/s (goal 1.2x): NOT MET"])

    def test_a_graphs_kernels_and_gaps(self):
        from harness import graph_table
        rows = ["5\t9\t7\t0\t1\t8,1,1\t256\t32\t0\tbefore the graph"]
        for launch, begin in ((2, 1000), (3, 11000), (4, 21000)):  # the second kernel overlaps the first
            for name, start, end in (("_Z1av", 0, 4000), ("_Z1bv", 3000, 5000), ("_Z1av", 6000, 8000)):
                rows.append(f"{begin + start}\t{begin + end}\t7\t3\t{launch}\t8,1,1\t256\t32\t0\t{name}")
        rows.append("31000\t32000\t7\t3\t5\t8,1,1\t256\t32\t0\t_Z1av")  # a replay that was cut off
        steps = graph_table.replays(graph_table.read("\n".join([*rows, "99\t10"])), 2)
        self.assertEqual([step[0].launch for step in steps], ["3", "4"])
        lines = graph_table.table(steps)
        self.assertEqual([line.split()[:3] for line in lines[1:-1]],
                         [["0.006", "2.0", "3.00"], ["0.002", "1.0", "2.00"]])
        self.assertEqual(lines[-1], "step 0.010 ms, its graph 0.008 ms: busy 0.007, idle 0.001 ms "
                         "in 3 launches, of 2 steps")

    def test_only_the_marked_section_of_a_page_changes(self):
        page = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb <!-- x:begin --><!-- x:end -->\n"
        self.assertEqual(self.report.replace_section(page, "results", "new\n"), page.replace("old", "new"))
        with self.assertRaises(ValueError):
            self.report.replace_section(page, "accuracy", "new")

    def test_shows_stored_results(self):
        from experiments import slow_links
        from experiments.table import ROWS
        for experiment, file in ((slow_links.EXPERIMENT, "24-slow-links/experiments"),
                                 (ROWS["ddp_loss"], "23-ddp/loss"), (ROWS["ddp_speed"], "23-ddp/speed"),
                                 (ROWS["fsdp_loss"], "23-fsdp/loss")):
            document = json.loads((ROOT / "docs/results" / f"2026-11-{file}.json").read_text())
            self.assertGreater(len(experiment.tables(document).splitlines()), 5, file)
            if experiment is slow_links.EXPERIMENT:
                page = slow_links.page_text(self.slow_links.Result(document), ["fp32"])
                self.assertIn("![One step: FP32]", page)

    def test_rejects_bad_input(self):
        script = str(ROOT / "bench/experiments/run.py")
        for words, expected in ((["slow_links", "--gradwire", "/nowhere/gradwire"], "/nowhere/gradwire"),
                                (["slow_lynx"], "Experiments: accuracy, "),
                                (["joining", "--show", "/nowhere"], "/nowhere is not a file"),
                                (["joining", "--rank", "two"], "--ranks")):
            result = subprocess.run([sys.executable, "-B", script, *words], capture_output=True, text=True,
                                    timeout=60)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(expected, result.stderr)


class ElasticAccuracy(unittest.TestCase):
    def setUp(self):
        from experiments import elastic_accuracy
        self.elastic = elastic_accuracy

    def test_means_and_spreads_beside_the_runs_that_lost_nobody(self):
        runs = [{"compression": "int8", "fate": fate, "seed": seed, "test_accuracy": accuracy}
                for fate, all_seeds in (("4 -> 3", (0.81, 0.82)), ("undisturbed", (0.80, 0.84)))
                for seed, accuracy in enumerate(all_seeds)]
        self.assertEqual(
            self.elastic.tables({"items": runs}).splitlines()[2:], [
                "| `int8` | undisturbed | 80.00, 84.00 | 82.00 | 2.83 | - |",
                "| `int8` | 4 -> 3 | 81.00, 82.00 | 81.50 | 0.71 | -0.50 |"
            ])

    def test_a_rank_is_lost_in_the_first_half_and_another_joins_later(self):
        ranks = set()
        for seed in range(50):
            run = self.elastic.Run("gradwire", pathlib.Path("nowhere"), "int8", "4 -> 3 -> 4", seed, 200)
            again = self.elastic.Run("gradwire", pathlib.Path("nowhere"), "int8", "4 -> 3 -> 4", seed, 200)
            self.assertEqual((run.rank, run.loss_at, run.join_at), (again.rank, again.loss_at, again.join_at))
            self.assertTrue(20 <= run.loss_at < 100 and run.loss_at < run.join_at < 150,
                            (run.loss_at, run.join_at))
            ranks.add(run.rank)
        self.assertEqual(ranks, {0, 1, 2, 3}, "rank 0, too")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: experiments_test.py ROOT_OF_THE_SOURCES [unittest arguments]")
    ROOT = pathlib.Path(sys.argv.pop(1))
    sys.path.insert(0, str(ROOT / "bench"))
    sys.dont_write_bytecode = True
    unittest.main()
