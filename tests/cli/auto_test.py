#!/usr/bin/env python3
"""Tests `gradwire train --compression auto`."""
import json

from command import CommandTest, SYNTHETIC, main

# In FP32 a step sends for 130 ms, many times as long as it computes.
SLOW = ["--model", "vit_tiny", "--data", "synthetic:64", "--batch-size", 2, "--steps", 4, "--device", "host",
        "--link", "50Mbit"]


class Auto(CommandTest):
    def check_run(self, out, records):
        """Checks that the run used what the record of the choice says. Returns the chosen prediction."""
        self.assertEqual([r["type"] for r in records[:3]], ["run", "choice", "step"])
        head, choice = records[:2]
        chosen = choice["prediction"]["recommended"]
        self.assertIn(chosen, choice["prediction"]["best"])
        self.assertEqual((head["compression"], head["bucket_mb"]),
                         (chosen["compression"], chosen["bucket_mb"]))
        self.assertIn(f"--compression {chosen['compression']} --bucket-mb {chosen['bucket_mb']}", out)
        self.assertIn("Prediction against the medians of the run", out)
        self.assertEqual(records[-1]["predicted"]["step_ms"], chosen["step_ms"])
        return chosen

    def test_threads_choose_within_the_error_on_a_slow_link(self):
        result = self.run_command("train", *SLOW, "--ranks", 2, "--compression",
                                  "auto:error=0.03,allow=bf16+int8+int4", "--log", "run.jsonl")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        records = self.records()
        # Which of the two depends on the measured kernels, which other processes slow down.
        self.assertIn(self.check_run(result.stdout, records)["compression"], ("bf16", "int8"))
        best = records[1]["prediction"]["best"]
        self.assertEqual([p["compression"] for p in best], ["fp32", "bf16", "int8", "int4"])
        self.assertEqual(best[0]["error"], 0)
        self.assertGreater(best[3]["error"], 0.03)
        self.assertIn("> 0.03", result.stdout)

    def test_processes_choose_alike_and_resume_with_the_choice(self):
        flags = ["train", *SLOW, "--log", "run.jsonl", "--checkpoint", "saved", "--checkpoint-every", 2,
                 "--resume", "saved", "--compression"]
        for request in ("auto", "auto:error=0"):  # the second run has nothing left to choose
            ends = [(*p.communicate(timeout=240), p.returncode) for p in self.start(2, *flags, request)]
            for out, error, code in ends:
                self.assertEqual((error, code), ("", 0), out[-300:])
            self.assertEqual(ends[1][0], "", "only rank 0 prints")
            if request == "auto":
                chosen = self.check_run(ends[0][0], self.records())
                self.assertNotEqual(chosen["compression"], "fp32")
                self.assertLessEqual(chosen["error"], 0.1)
                (self.folder / "meeting").unlink(missing_ok=True)
        self.assertIn(f"Continuing with the checkpoint's --compression {chosen['compression']}", ends[0][0])

    def test_processes_with_different_requests_are_refused(self):
        for theirs in ("fp32", "auto:error=0.5"):
            (self.folder / "meeting").unlink(missing_ok=True)
            own = {0: ["--compression", "auto"], 1: ["--compression", theirs]}
            processes = self.start(2, "train", *SYNTHETIC, "--steps", 2, own=own)
            errors = [p.communicate(timeout=240)[1] for p in processes]
            self.assertEqual(processes[0].returncode, 2, errors[0])
            self.assertIn("rank 1 was started with other settings", errors[0])
            self.assertIn("auto:error=0.1 here", errors[0].replace('"', ""))
            self.assertNotEqual(processes[1].returncode, 0)

    def test_ranks_choose_again_at_the_same_step_when_the_link_changes(self):
        flags = ["train", "--model", "vit_tiny", "--data", "synthetic:256", "--batch-size", 8, "--device",
                 "host", "--eval-every", 0, "--log", "run.jsonl", "--compression", "auto:allow=int8"]
        for p in self.start(2, *flags, "--steps", 40, "--link", "2Gbit"):
            self.assertEqual((p.communicate(timeout=240)[1], p.returncode), ("", 0))
        step_ms = self.records()[-1]["step_ms"]
        for attempt in range(3):
            (self.folder / "meeting").unlink(missing_ok=True)
            link = f"2Gbit,then=40Mbit@{round(120 * step_ms)}ms"
            ends = [(*p.communicate(timeout=240), p.returncode)
                    for p in self.start(2, *flags, "--steps", 300, "--link", link)]
            for out, error, code in ends:
                self.assertEqual((error, code), ("", 0), out[-300:])
            records = self.records()
            times = [r["communicate_ms"] for r in records if r["type"] == "step"]
            # FP32 takes 165 ms on the slow link, INT8 41 ms.
            slow = [step for step, pair in enumerate(zip(times, times[1:])) if min(pair) > 35]
            if slow and 40 <= slow[0] <= 240:
                break
        self.assertTrue(slow and 40 <= slow[0] <= 240, "the link changed where the run could not notice")
        later = [r for r in records if r["type"] == "choice" and r["step"] > slow[0]]
        # An earlier choice, by noise, that kept the plan makes the next alarm wait for 100 steps.
        begin = max([slow[0]] + [r["step"] + 100 for r in records if r["type"] == "choice" and
                                 0 < r["step"] <= slow[0]])
        self.assertLessEqual(later[0]["step"] - begin, 50)
        self.assertIn("links take", later[0]["why"])
        self.assertEqual(later[0]["prediction"]["recommended"]["compression"], "int8")
        self.assertIn("--compression int8", ends[0][0])
        self.assertEqual(len(times), 300)

    def test_a_saved_plan_is_repeated_without_measuring(self):
        flags = ["train", *SLOW, "--log", "run.jsonl", "--compression", "auto:replan=off,plan=plan.json"]
        outs, losses = [], []
        for _ in range(2):
            result = self.run_command(*flags, "--ranks", 2)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            outs.append(result.stdout)
            losses.append([r["loss"] for r in self.records() if r["type"] == "step"])
        self.assertIn("Measured for", outs[0])
        self.assertNotIn("Measured for", outs[1])
        plan = json.loads((self.folder / "plan.json").read_text())
        chosen = self.check_run(outs[1], self.records())
        for key in ("compression", "bucket_mb"):
            self.assertEqual(plan[key], chosen[key])
        self.assertEqual(*losses)
        for other, parts in ((["--ranks", 3], "ranks 2, this run has 3"),
                             (["--ranks", 2, "--depth", 2], "another size")):
            self.assert_refused(self.run_command(*flags, *other), "plan.json", parts)
        for damaged in ({}, {**plan, "predicted": {}}, {**plan, "compression": "int9"}):
            (self.folder / "plan.json").write_text(json.dumps(damaged))
            part = "int9" if damaged.get("compression") == "int9" else "plan.json"
            self.assert_refused(self.run_command(*flags, "--ranks", 2), part)

    def test_a_checkpoint_of_one_rank_has_no_choice_for_two(self):
        at = SLOW.index("--steps")
        flags = ["train", *SLOW[:at], *SLOW[at + 2:], "--checkpoint", "saved", "--checkpoint-every", 2,
                 "--compression", "auto:allow=int8"]
        for ranks, steps in ((1, 2), (2, 4)):
            result = self.run_command(*flags, "--ranks", ranks, "--steps", steps, "--resume", "saved")
            self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("Choice: --compression int8", result.stdout)

    def test_combinations_without_a_prediction_are_refused(self):
        for flags, parts in (
            (["--shard", "optimizer"], ["--shard optimizer", "name a spec"]),
            (["--overlap-forward"], ["--overlap-forward", "name a spec"]),
            (["--optimizer", "dion:rank=4"], ["--optimizer dion", "name a spec"]),
            (["--bucket-mb", "0.5"], ["--bucket-mb 0.5", "whole number"]),
            (["--compression", "auto:best"], ["auto:best", "auto[:error=E]"]),
        ):
            extra = flags if "--compression" in flags else [*flags, "--compression", "auto"]
            self.assert_refused(self.run_command("train", *SYNTHETIC, "--ranks", 2, *extra), *parts)
        self.assert_refused(self.run_command("compare", *SYNTHETIC, "--compression", "auto"), "auto",
                            "gradwire train")

    def test_a_single_rank_has_nothing_to_choose(self):
        result = self.run_command("train", *SYNTHETIC, "--steps", 1, "--compression", "auto")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("no effect on a single rank", result.stdout)


if __name__ == "__main__":
    main()
