#!/usr/bin/env python3
"""Tests `gradwire train --compression auto`."""
import json
import re
import shutil

from command import CommandTest, SYNTHETIC, main, synthetic

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
        result = self.succeed("train", *SLOW, "--ranks", 2, "--compression",
                              "auto:error=0.03,allow=bf16+int8+int4", "--log", "run.jsonl")
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
            ends = self.ends(self.start(2, *flags, request))
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

    def test_a_plan_that_not_all_processes_have_is_refused(self):
        flags = ["train", *SYNTHETIC, "--steps", 2]
        own = [["--compression", f"auto:plan={name}.json"] for name in ("first", "second")]
        self.assertEqual(self.run_command(*flags, *own[0], "--ranks", 2).returncode, 0)
        processes = self.start(2, *flags, own=dict(enumerate(own)))
        errors = [p.communicate(timeout=240)[1] for p in processes]
        self.assertEqual(processes[0].returncode, 2, errors[0])
        self.assertIn("rank 1 was started with other settings", errors[0])
        self.assertNotEqual(processes[1].returncode, 0)
        self.assertFalse((self.folder / "second.json").exists())

    def test_ranks_choose_again_at_the_same_step_when_the_link_changes(self):
        flags = ["train", "--model", "vit_tiny", "--data", "synthetic:256", "--batch-size", 8, "--device",
                 "host", "--eval-every", 0, "--log", "run.jsonl", "--compression", "auto:allow=bf16+int8"]
        def train(steps, link):
            """Returns what rank 0 printed, the records, and the seconds of the choice before the first step."""
            for old in ("meeting", "run.jsonl"):
                (self.folder / old).unlink(missing_ok=True)
            ends = self.ends(self.start(2, *flags, "--steps", steps, "--link", link))
            return ends[0][0], self.records(), float(re.search(r"auto:\S+ in ([\d.]+) s", ends[0][0])[1])

        _, records, measured_s = train(40, "2Gbit")
        step_ms, choices = records[-1]["step_ms"], []
        for attempt in range(4):  # other work on the machine delays single runs
            link = f"2Gbit,then=40Mbit@{round(1000 * measured_s + 150 * step_ms)}ms"
            out, records, measured_s = train(400, link)
            times = [r["communicate_ms"] for r in records if r["type"] == "step"]
            self.assertEqual(len(times), 400)
            # FP32 takes 165 ms on the slow link, BF16 82 ms, INT8 41 ms.
            slow = [step for step, pair in enumerate(zip(times, times[1:])) if min(pair) > 35]
            if not slow or not 40 <= slow[0] <= 340:
                continue  # the link changed where the run could not notice
            choices = [r for r in records if r["type"] == "choice" and r["step"] > 0]
            later = [r for r in choices if r["step"] > slow[0]]
            # An earlier choice, by noise, that kept the plan makes the next alarm wait for 100 steps.
            begin = max([slow[0]] + [r["step"] + 100 for r in choices if r["step"] <= slow[0]])
            if later and later[0]["step"] - begin <= 50:
                break
        else:
            self.fail(f"no choice within 50 steps in four runs: {link}, {slow[:2]}, "
                      f"{[(r['step'], r['why']) for r in choices]}")
        self.assertIn("links take", later[0]["why"])
        # Which of the two depends on the measured kernels: sanitizers make INT8's many times as slow.
        chosen = later[0]["prediction"]["recommended"]["compression"]
        self.assertIn(chosen, ("bf16", "int8"))
        self.assertIn("--compression " + chosen, out)

    def test_a_saved_plan_is_repeated_without_measuring(self):
        flags = ["train", *SLOW, "--compression", "auto:replan=off,plan=plan.json"]
        outs, losses = [], []
        for log in ("first.jsonl", "run.jsonl"):
            result = self.succeed(*flags, "--ranks", 2, "--log", log)
            outs.append(result.stdout)
            losses.append([r["loss"] for r in self.records(log) if r["type"] == "step"])
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

    def test_an_edited_plan_that_the_run_may_not_choose_is_refused(self):
        def run(*flags, request="allow=int4:dense=off+bf16"):
            return self.run_command("train", *SYNTHETIC, "--steps", 2, "--ranks", 2, *flags,
                                    "--compression", f"auto:replan=off,plan=plan.json,{request}")

        self.assertEqual(run().returncode, 0)
        plan = json.loads((self.folder / "plan.json").read_text())
        int4 = "int4:dense=off"
        error = next(p["error"] for p in plan["choice"]["prediction"]["best"] if p["compression"] == int4)
        loose, strict = f"error={error * 1.01},allow={int4}+bf16", f"error={error * 0.99},allow={int4}+bf16"
        for change, flags, request, parts in (
            ({"compression": int4}, [], loose, None),
            ({"bucket_mb": 25}, ["--bucket-mb", 25], loose, None),
            ({"compression": int4}, [], strict, [f"the error of {int4} is", "more than error="]),
            ({"compression": int4, "choice": {}}, [], loose, ["not recorded"]),
            ({"compression": "dion:rank=4"}, [], loose, [f"fp32, {int4}, bf16", "dion:rank=4"]),
            ({"compression": "x.py"}, [], loose, ["x.py"]),
            ({"compression": "topk:momentum=0.9"}, [], loose, ["topk:momentum=0.9"]),
            ({"compression": "int4:dense=nosuch"}, [], loose, ["nosuch"]),
            ({"bucket_mb": 1e300}, [], loose, ["bucket_mb 1e+300"]),
            ({"bucket_mb": 1e-9}, [], loose, ["bucket_mb 1e-09"]),
            ({"bucket_mb": 0.3}, [], loose, ["bucket_mb 0.3"]),
            ({"bucket_mb": 25}, ["--bucket-mb", 5], loose, ["25 MiB", "--bucket-mb 5"]),
        ):
            (self.folder / "plan.json").write_text(json.dumps({**plan, **change}))
            result = run(*flags, request=request)
            if parts is None:
                self.assertEqual((result.returncode, result.stderr), (0, ""))
            else:
                self.assert_refused(result, "plan.json", "name another file", *parts)
        with open(self.folder / "plan.json", "w") as file:
            file.truncate(1 << 40)
        self.assert_refused(run(), "plan.json", "bytes are too many", "name another file")

    def test_a_plan_that_needs_more_than_the_memory_limit_is_refused(self):
        flags = ["train", *synthetic("--width", 64), "--steps", 2, "--ranks", 2, "--compression",
                 "auto:error=1,plan=plan.json,allow=int4:dense=off"]
        self.assertEqual(self.run_command(*flags).returncode, 0)
        path = self.folder / "plan.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "compression": "int4:dense=off"}))
        # INT4 has a residual besides the memory of FP32.
        needs = self.run_command(*flags, "--memory-limit", "1K").stderr.split("each rank needs ")[1]
        number, unit = needs.split()[:2]
        limit = round(float(number) * 1.01 * {"kB": 1e3, "MB": 1e6}[unit])
        self.assert_refused(self.run_command(*flags, "--memory-limit", limit), "plan.json", "--memory-limit",
                            "int4:dense=off with buckets of", "name another file")

    def test_a_checkpoint_with_momentum_keeps_its_spec(self):
        sgd = ["--optimizer", "sgd", "--momentum", 0]
        for name, first, later in (("dion", ["--optimizer", "dion:rank=4"], []),
                                   ("momentum", ["--compression", "topk:momentum=0.9", *sgd], sgd)):
            for ranks in (2, 4):
                saved = f"{name}-{ranks}"
                run = ["train", *SYNTHETIC, "--steps", 6, "--log", log := f"{saved}.jsonl"]
                self.succeed(*run, "--ranks", 2, *first, "--checkpoint", saved,
                             "--checkpoint-every", 3)
                whole = self.records(log)
                shutil.rmtree(next((self.folder / saved).glob("*6")))
                result = self.succeed(*run, "--ranks", ranks, *later, "--resume", saved, "--compression",
                                      "auto")
                self.assertIn("no effect on a checkpoint of " + whole[0]["compression"], result.stdout)
                self.assertNotIn("Measured for", result.stdout)
                self.assertEqual(self.records(log)[0]["compression"], whole[0]["compression"])
                if ranks == 2:
                    before, after = ([r["loss"] for r in log if r["type"] == "step"]
                                     for log in (whole, self.records(log)))
                    self.assertEqual(after, before)  # the log keeps the steps before

    def test_a_checkpoint_of_one_rank_has_no_choice_for_two(self):
        at = SLOW.index("--steps")
        flags = ["train", *SLOW[:at], *SLOW[at + 2:], "--checkpoint", "saved", "--checkpoint-every", 2,
                 "--compression", "auto:allow=int8"]
        for ranks, steps in ((1, 2), (2, 4)):
            result = self.succeed(*flags, "--ranks", ranks, "--steps", steps, "--resume", "saved")
        self.assertIn("Measured for --compression auto", result.stdout)
        self.assertIn("\nChoice: ", result.stdout)

    def test_combinations_without_a_prediction_are_refused(self):
        for flags, parts in (
            (["--shard", "optimizer"], ["--shard optimizer", "name a spec"]),
            (["--overlap-forward"], ["--overlap-forward", "name a spec"]),
            (["--optimizer", "dion:rank=4"], ["--optimizer dion", "name a spec"]),
            (["--bucket-mb", "0.5"], ["--bucket-mb 0.5", "whole number"]),
            (["--compression", "auto:best"], ["auto:best", "auto[:error=E]"]),
            (["--compression", "auto:error=0.1,error=0.2"], ["'error' is given twice", "auto[:error=E]"]),
            (["--compression", "auto:plan=a,replan=off,plan=b"], ["'plan' is given twice"]),
        ):
            extra = flags if "--compression" in flags else [*flags, "--compression", "auto"]
            self.assert_refused(self.run_command("train", *SYNTHETIC, "--ranks", 2, *extra), *parts)
        self.assert_refused(self.run_command("compare", *SYNTHETIC, "--compression", "auto"), "auto",
                            "gradwire train")

    def test_a_single_rank_has_nothing_to_choose(self):
        result = self.succeed("train", *SYNTHETIC, "--steps", 1, "--compression", "auto")
        self.assertIn("no effect on a single rank", result.stdout)


if __name__ == "__main__":
    main()
