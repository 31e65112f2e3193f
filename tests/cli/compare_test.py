#!/usr/bin/env python3
"""Tests `gradwire compare`: its table, its files, and continuing an interrupted comparison."""
import json
import re
import statistics

from command import CommandTest, SYNTHETIC, main


class Compare(CommandTest):
    def test_table_and_files(self):
        result = self.succeed("compare", *SYNTHETIC, "--ranks", 2, "--steps", 3, "--compression", "fp32",
                              "--compression", "bf16", "--compression", "powersgd:rank=1", "--json",
                              "out.json")
        self.assertEqual(self.files(), ["out.0.jsonl", "out.1.jsonl", "out.2.jsonl", "out.json"])
        runs = json.loads((self.folder / "out.json").read_text())
        self.assertEqual([r["compression"] for r in runs], ["fp32", "bf16", "powersgd:rank=1"])
        for run in runs:
            self.assertEqual(set(run), {
                    "compression", "test_accuracy", "test_accuracy_std", "final_loss", "final_loss_std",
                    "step_ms", "images_per_s", "wire_bytes", "wire_bytes_per_element", "dense_bytes", "ratio",
                    "exposed_comm_ms", "ranks", "device", "link", "schedule", "bucket_mb", "seeds"})
            self.assertEqual(run["dense_bytes"], runs[0]["wire_bytes"])
        self.assertAlmostEqual(runs[0]["ratio"], 1.0)
        self.assertGreater(runs[1]["ratio"], 1.9)
        table = result.stdout[result.stdout.index("compression  "):].splitlines()
        self.assertEqual([line.split()[0] for line in table[2:5]], ["fp32", "bf16", "powersgd:rank=1"])

    def test_a_run_that_diverges_ends_and_is_shown_as_diverged(self):
        flags = ["compare", *SYNTHETIC, *self.specs("fp32", "int8"), "--optimizer", "sgd", "--lr", "1e6",
                 "--steps", 20000, "--eval-every", 0.01, "--json", "out.json"]
        threads = self.run_command(*flags, "--ranks", 2)
        self.check_diverged(threads.returncode, threads.stdout, threads.stderr)
        self.assertIn("already done", self.run_command(*flags, "--ranks", 2).stdout)
        ranks = self.start(2, *flags)
        out, error = ranks[0].communicate(timeout=240)
        self.check_diverged(ranks[0].returncode, out, error)
        self.assertEqual((ranks[1].communicate(timeout=60)[1], ranks[1].returncode), ("", 0))

    def check_diverged(self, code, out, error):
        self.assertEqual((code, len(re.findall("warning: .* is nan; the run ends", error))), (0, 2), error)
        self.assertRegex(out, r"\nfp32 +- +diverged .*\nint8 +- +diverged ")
        for row in json.loads((self.folder / "out.json").read_text()):
            self.assertEqual((row["test_accuracy"], row["seeds"][0]["diverged"]), (None, True))
            steps = [r for r in self.records(row["seeds"][0]["log"]) if r["type"] == "step"]
            self.assertLess(len(steps), 20000)

    def test_emulated_links_are_named_and_keep_every_bit(self):
        fixed = ("--compression", "int8:schedule=two_shot", "--compression", "powersgd:rank=1,schedule=ring")
        _, fast = self.compare(*fixed)
        logs = [self.records(f"out.{i}.jsonl") for i in range(2)]
        shown, slow = self.compare(*fixed, "--link", "100Mbit,1ms")
        self.assertIn("\nLinks: emulated, 100Mbit,1ms", shown)
        self.assertIn("2 ranks over emulated links of 100Mbit,1ms", shown)
        self.assertEqual([(run["link"], run["final_loss"]) for run in slow],
                         [("100Mbit,1ms", run["final_loss"]) for run in fast])
        logs += [self.records(f"out.{i}.jsonl") for i in (2, 3)]  # of new runs: no log was reused
        self.assertEqual([log[0].get("link") for log in logs], [None, None, "100Mbit,1ms", "100Mbit,1ms"])
        losses = [[r["loss"] for r in log if r["type"] == "step"] for log in logs]
        self.assertEqual(losses[:2], losses[2:])

    def test_all_start_from_the_same_weights(self):
        self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 1, "--compression", "fp32",
                         "--compression", "bf16", "--bucket-mb", 0.002, "--bucket-mb", 25, "--json",
                         "out.json")
        logs = [self.records(f"out.{i}.jsonl") for i in range(4)]
        self.assertEqual(len({log[1]["loss"] for log in logs}), 1)
        # The logs cover every compression with every bucket size.
        self.assertEqual([(log[0]["compression"], log[0]["bucket_mb"]) for log in logs],
                         [("fp32", 0.002), ("fp32", 25), ("bf16", 0.002), ("bf16", 25)])
        self.assertGreater(logs[0][0]["buckets"], logs[1][0]["buckets"])
        self.assertEqual([r["bucket_mb"] for r in json.loads((self.folder / "out.json").read_text())],
                         [0.002, 25, 0.002, 25])

    def compare(self, *arguments):
        steps = [] if "--steps" in arguments else ["--steps", 2]
        result = self.succeed("compare", *SYNTHETIC, "--ranks", 2, *steps, "--json", "out.json",
                              *arguments)
        return result.stdout, json.loads((self.folder / "out.json").read_text())

    def contents(self):
        return {name: (self.folder / name).read_bytes() for name in self.files()}

    def specs(self, *names):
        return [word for name in names for word in ("--compression", name)]

    def test_continues_an_interrupted_comparison(self):
        out, whole = self.compare(*self.specs("fp32", "bf16", "fp8"))
        self.assertNotIn("already done", out)
        before = self.contents()
        # This state imitates a kill: the table is missing, and the second log ends within a line.
        (self.folder / "out.json").unlink()
        (self.folder / "out.1.jsonl").write_bytes(before["out.1.jsonl"][:-200])
        out, again = self.compare(*self.specs("fp32", "bf16", "fp8"))
        after = self.contents()
        self.assertIn(
            "2 of 3 runs are already done with the same settings and are skipped; remove their logs", out)
        self.assertIn("[1/3] fp32: already done, see out.0.jsonl", out)
        self.assertRegex(
            out, r"\[2/3\] bf16; an earlier run did not finish \(out.1.jsonl\); starting over; about .* left")
        self.assertEqual([after[f"out.{i}.jsonl"] == before[f"out.{i}.jsonl"] for i in range(3)],
                         [True, False, True])
        figures = lambda rows: [(r["compression"], r["final_loss"], r["test_accuracy"], r["wire_bytes"], r[
            "ratio"], r["schedule"], r["wire_bytes_per_element"]) for r in rows]
        self.assertEqual(figures(again), figures(whole))
        for i in (0, 2):
            self.assertEqual(again[i], whole[i])  # unchanged records, including times

    def test_reuses_only_runs_with_the_same_settings(self):
        self.compare(*self.specs("fp32", "bf16"))
        before = self.contents()
        # With a new run in between, the existing runs keep their logs.
        out, rows = self.compare(*self.specs("fp32", "fp8", "bf16", "bf16"))
        self.assertIn("2 of 4 runs", out)
        self.assertEqual([row["seeds"][0]["log"] for row in rows],
                         ["out.0.jsonl", "out.2.jsonl", "out.1.jsonl", "out.3.jsonl"])
        for name in ("out.0.jsonl", "out.1.jsonl"):
            self.assertEqual(self.contents()[name], before[name])
        self.assertEqual([self.records(row["seeds"][0]["log"])[0]["compression"] for row in rows],
                         ["fp32", "fp8", "bf16", "bf16"])
        out, _ = self.compare(*self.specs("fp32", "bf16"), "--lr", 0.5)
        self.assertNotIn("already done", out)
        self.assertEqual(self.contents()["out.0.jsonl"], before["out.0.jsonl"])
        self.assertTrue((self.folder / "out.5.jsonl").exists())  # logs of other settings stay
        # The command must run again, because a trace requires a run.
        out, _ = self.compare(*self.specs("fp32"), "--lr", 0.5, "--trace", "trace.json")
        self.assertNotIn("already done", out)
        self.assertTrue((self.folder / "trace.0.json").exists())

    def test_each_of_several_seeds_equals_a_single_run(self):
        self.compare(*self.specs("fp32", "bf16"), "--seed", 7)
        out, rows = self.compare(*self.specs("fp32", "bf16"), "--seed", 7, "--seeds", 3)
        self.assertIn("2 of 6 runs are already done", out)
        self.assertIn("[4/6] bf16, seed 8", out)
        self.assertIn("mean and standard deviation over 3 seeds", out)
        self.assertEqual([[s["seed"] for s in row["seeds"]] for row in rows], [[7, 8, 9]] * 2)
        for row in rows:
            losses = [s["final_loss"] for s in row["seeds"]]
            self.assertEqual(len(set(losses)), 3)
            self.assertAlmostEqual(row["final_loss"], statistics.mean(losses))
            self.assertAlmostEqual(row["final_loss_std"], statistics.stdev(losses))
            self.assertAlmostEqual(row["test_accuracy_std"],
                                   statistics.stdev(s["test_accuracy"] for s in row["seeds"]))
        log = rows[1]["seeds"][2]["log"]
        self.succeed("train", *SYNTHETIC, "--ranks", 2, "--steps", 2, "--compression", "bf16", "--seed", 9,
                     "--log", "alone.jsonl")
        self.succeed("train", "--like", log, "--log", "like.jsonl")
        numbers = lambda log: [(r.get("loss"), r.get("test_loss")) for r in self.records(log)
                               if r["type"] in ("step", "eval")]
        self.assertEqual(numbers("alone.jsonl"), numbers(log))
        self.assertEqual(numbers("like.jsonl"), numbers(log))
        _, rows = self.compare(*self.specs("bf16"), "--bucket-mb", 1)
        self.succeed("train", "--like", rows[0]["seeds"][0]["log"], "--log", "one.jsonl")

    def test_target_accuracy_is_the_time_of_the_first_evaluation_that_reaches_it(self):
        def seconds_to(target):
            _, rows = self.compare(*self.specs("fp32"), "--steps", 16, "--eval-every", 0.25,
                                   "--target-accuracy", target)
            self.assertAlmostEqual(rows[0]["target_accuracy"], target / 100)
            return rows[0]["seconds_to_target"]

        first = seconds_to(0)
        evals = [r for r in self.records("out.0.jsonl") if r["type"] == "eval"]
        self.assertEqual([e["step"] for e in evals], list(range(2, 17, 2)))
        steps = [r["step_ms"] for r in self.records("out.0.jsonl") if r["type"] == "step"]
        for number, record in enumerate(evals):
            self.assertAlmostEqual(record["seconds"], sum(steps[:2 * number + 2]) / 1000)
        self.assertEqual(first, evals[0]["seconds"])
        best = max(evals, key=lambda e: e["test_accuracy"])  # the first of the best
        self.assertEqual(seconds_to(100 * best["test_accuracy"] - 1e-6), best["seconds"])
        if best["test_accuracy"] < 1:
            self.assertIsNone(seconds_to(100))

    def test_the_shelf_contains_every_format(self):
        _, rows = self.compare(*self.specs("bf16", "shelf", "bf16:ef=off"), "--eval-every", 0)
        names = [row["compression"] for row in rows]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual(names[0], "fp32")
        self.assertEqual(names[-1], "bf16:ef=off")
        specs = self.succeed("formats").stdout.partition("\n\n")[0]
        formats = re.findall(r"^([a-z]\w+)", specs, re.M)[1:]  # without the heading
        self.assertGreaterEqual(len(formats), 16, specs)
        self.assertLessEqual({"bf16", "topk", "powersgd", "randk", "dion"}, set(formats))
        for name in set(formats) - {"dion"}:
            self.assertTrue(any(re.split("[:,]", spec)[0] == name for spec in names), name)
        for row in rows:
            self.assertAlmostEqual(
                row["wire_bytes_per_element"] * self.records("out.0.jsonl")[0]["parameters"],
                row["wire_bytes"])

    def test_four_ranks_are_the_default(self):
        first = self.succeed("compare", *SYNTHETIC, *self.specs("fp32"), "--dry-run").stdout.splitlines()[0]
        self.assertRegex(first, "^Device: .*, 4 ranks.*; --ranks was not given, so 4$")

    def test_bad_input(self):
        for arguments, parts in (([], ["--compression SPEC", "--compression shelf"]),
                                 (["--compression", "shelves"], ["unknown method 'shelves'"]),
                                 (["--compression", "fp32", "--seeds", 0], ["--seeds"]),
                                 (["--compression", "shelf", "--compression", "zip"],
                                  ["unknown method 'zip'"])):
            self.assert_refused(self.run_command("compare", *SYNTHETIC, *arguments), *parts)


if __name__ == "__main__":
    main()
