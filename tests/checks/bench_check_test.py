#!/usr/bin/env python3
"""Tests bench/harness/check.py on invented results: which cases pass, fail or are missing. Times nothing."""
import contextlib
import io
import json
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".").resolve()
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from harness import check  # noqa: E402

HERE = "this machine"


def case(**changed):
    return {
        "case": "hook", "step": "hook", "command": ["gradwire-bench",
                                                    "hook"], "where": {"spec": "bf16"}, "metric": "speedup",
        "value": 6.0, "goal": 5, "noise": 0.1, "commit": "abc", "device": "another machine", **changed
    }


def row(speedup, **more):
    return {"spec": "bf16", "speedup": speedup, **more}


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-check-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_goals_count_everywhere_and_published_values_on_their_device_less_the_noise(self):
        here, published = case(device=HERE), case(goal=None)
        for the_case, speedup, verdict in (
                (case(), 5.0, "ok"), (case(), 4.51, "ok"), (case(), 4.49, "NOT MET"),
                (case(), 0.1, "NOT MET"), (here, 5.41, "ok"), (here, 5.39, "SLOWER"),
                (here, 4.49, "NOT MET"), (published, 0.1, "ok"),
                (case(goal=None, device=HERE), 5.3, "SLOWER"), (case(goal=None, device=HERE), 1e6, "ok"),
                (case(value=3.0, device=HERE), 3.0, "NOT MET"),  # published below the goal
                (case(), 1e6, "ok"), (here, 1e6, "ok")):  # faster never fails
            self.assertEqual(check.verdict_of(the_case, [row(speedup)], HERE)["verdict"], verdict,
                             (the_case, speedup))

    def test_what_was_not_measured_fails(self):
        for rows, why in ((None, "command failed"), ([], "no row with spec=bf16"),
                          ([row(9, spec="fp8")], "no row"), ([row(None)], "speedup is null"),
                          ([{"spec": "bf16"}], "speedup is null"), ([row(float("nan"))], "NaN"),
                          ([row(0)], "speedup is 0"), ([row("fast")], '"fast"')):
            verdict = check.verdict_of(case(), rows, HERE)
            self.assertEqual((verdict["verdict"], verdict["measured"]), ("NOT MEASURED", None))
            self.assertIn(why, verdict["why"])

    def test_ratios(self):
        times = [{"spec": "fp32", "time_us": 300.0,
                  "baseline_time_us": 270.0}, {"spec": "bf16", "schedule": "ring", "time_us": 200.0},
                 {"spec": "bf16", "schedule": "tree", "time_us": 100.0}]
        best = check.measured(case(metric="time_us", over={"spec": "fp32"}), times)  # of several rows
        self.assertEqual(best, 3)
        self.assertEqual(
            check.measured(case(metric="baseline_time_us/time_us", where={"spec": "fp32"}), times), 0.9)
        self.assertEqual(check.measured(case(of=4), [row(2), row(3)]), 0.75)
        with self.assertRaises(check.NotMeasured):
            check.measured(case(metric="time_us", over={"spec": "fp8"}), times)

    def write(self, *cases):
        path = self.folder / "baselines.jsonl"
        path.write_text("".join(json.dumps(c) + "\n" for c in cases))
        return path

    def command(self, *arguments):
        command = [sys.executable, "-B", str(ROOT / "bench/harness/check.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    def test_judging_a_folder(self):
        path = self.write(case(), case(case="other", where={"spec": "fp8"}),
                          case(case="absent", step="nothing"))
        results = self.folder / "hook.json"
        results.write_text(json.dumps([row(7), row(1, spec="fp8")]))
        done = self.command("compare", self.folder, "--baselines", path)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        for text in ("NOT MET", "NOT MEASURED: its command failed", "1 of 3 cases ok, 2 FAILED"):
            self.assertIn(text, done.stdout)
        done = self.command("compare", self.folder, "--baselines", path, "--only", "^hook$", "--markdown")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("| hook | 7 | 5 | 6 elsewhere | 10 % | ok |", done.stdout)

    def bench(self, script):
        """Returns a build folder in which gradwire-bench is the given shell script."""
        path = self.folder / "build" / "bin" / "gradwire-bench"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path.parents[1]

    def run_cases(self, script, *cases, retries=1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runs = check.Runs(cases, self.bench(script), self.folder)
            verdicts = check.run(cases, runs, retries, HERE)
        return [j["verdict"] for j in verdicts], printed.getvalue()

    WRITE = (
        'while [ "$1" != --json ]; do shift; done; echo "[{{\\"spec\\": \\"bf16\\", \\"speedup\\": {}}}]" >'
        ' "$2"\n'
    )

    def test_a_failing_case_is_measured_once_more_and_the_better_counts(self):
        count = f'echo x >> {self.folder}/count; n=$(wc -l < {self.folder}/count)\n'
        runs = lambda: len((self.folder / "count").read_text().splitlines())
        verdicts, told = self.run_cases(count + self.WRITE.format("$((n * 3))"), case())
        self.assertEqual((verdicts, runs()), (["ok"], 2))
        self.assertIn("once more", told)
        (self.folder / "count").unlink()
        self.assertEqual(
            self.run_cases(count + self.WRITE.format("$((n * 3))"), case(), retries=0)[0], ["NOT MET"])
        (self.folder / "count").unlink()
        # The first measurement is better but too slow. A case that passes is not measured again.
        verdicts, _ = self.run_cases(count + self.WRITE.format("$((5 - n))"), case(),
                                     case(case="easy", goal=1))
        self.assertEqual((verdicts, runs()), (["NOT MET", "ok"], 2))

    def test_a_command_that_fails_is_a_failure(self):
        verdicts, told = self.run_cases("echo 'it hurts'; exit 3\n", case())
        self.assertEqual(verdicts, ["NOT MEASURED"])
        self.assertIn("FAILED (3): it hurts", told)
        stale = self.folder / "hook.json"
        stale.write_text(json.dumps([row(9)]))
        self.assertEqual(self.run_cases("exit 3\n", case())[0], ["NOT MEASURED"])

    def test_a_missing_row_is_an_error_that_names_the_most_similar_rows(self):
        rows = [{"op": f"int{bits}_decode", "cache": "warm", "speedup": 9} for bits in range(20)]
        rows.append({"op": "bf16_reduce_encode", "cache": "cold", "speedup": 9})
        verdict = check.verdict_of(case(where={"op": "bf16_encode", "cache": "cold"}), rows, HERE)
        self.assertEqual(verdict["verdict"], "NOT MEASURED")
        self.assertTrue(
            verdict["why"].startswith("no row with op=bf16_encode, cache=cold; the rows are: "
                                     "op=bf16_reduce_encode, cache=cold; op=int0_decode, cache=warm; "),
            verdict["why"])
        self.assertTrue(verdict["why"].endswith("; 13 more"), verdict["why"])

    def test_a_smoke_run_fails_for_missing_rows_and_not_for_speed(self):
        build = self.bench(self.WRITE.format(0.001))
        for spec, code in (("bf16", 0), ("bf17", 1)):
            done = self.command("run", "--smoke", "--build", build, "--baselines",
                                self.write(case(device=check.device_name(), where={"spec": spec})))
            self.assertEqual((done.returncode, done.stderr), (code, ""), done.stdout)
        self.assertIn("no row with spec=bf17; the rows are: spec=bf16", done.stdout)
        self.assertEqual(self.command("publish", self.folder, "--smoke").returncode, 2)

    def test_a_smoke_run_has_small_sizes_and_every_other_flag(self):
        build = self.bench(f'echo "$@" >> {self.folder}/calls; [ "$1" = hook ] || exit 0\n' +
                           self.WRITE.format(9))
        command = ["gradwire-bench", "hook", "--model", "vit_b_32", "--stop", "10", "--compression", "bf16"]
        path = self.write(case(command=command, where={"spec": "bf16"}))
        self.assertEqual(self.command("run", "--smoke", "--build", build, "--baselines", path).returncode, 0)
        model, hook = (self.folder / "calls").read_text().splitlines()
        self.assertIn("--model vit_b_32", model, "the name is checked")
        self.assertTrue(hook.startswith("hook --model vit_tiny --stop 1 --compression bf16 --json "), hook)

    def against(self, exits):
        """Runs bench-check against older results. `exits`: the exit codes of gradwire-bench compare."""
        count = self.folder / "compared"
        build = self.bench(f'if [ "$1" = compare ]; then echo x >> {count}; echo "row SLOWER"\n'
                           f'  [ $(wc -l < {count}) = 1 ] && exit {exits[0]}; exit {exits[-1]}\nfi\n' +
                           self.WRITE.format(9))
        (self.folder / "before").mkdir()
        return self.command("run", "--build", build, "--baselines", self.write(case()), "--out",
                            self.folder / "after", "--against", self.folder / "before")

    def test_a_row_that_is_slower_twice_than_another_builds_fails(self):
        done = self.against((1, 1))
        self.assertEqual((done.returncode, done.stderr), (1, ""), done.stdout)
        self.assertIn("row SLOWER", done.stdout)
        self.assertIn(f"SLOWER than in {self.folder}/before: hook", done.stdout)
        self.assertEqual((self.folder / "compared").read_text(), "x\n" * 2)

    def test_a_row_that_is_slower_once_passes(self):
        done = self.against((1, 0))
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertNotIn("SLOWER than", done.stdout)

    def test_results_that_cannot_be_compared_are_bad_input(self):
        self.assertEqual(self.against((2,)).returncode, 2)

    def test_bad_input(self):
        path = self.write(case())
        unknown, two = dict(case(), gaol=3), case(case="b", command=["other"])
        for arguments, *parts in ((["compare", self.folder, "--baselines",
                                    "/nowhere"], "/nowhere", "No such file"),
                                  (["compare", self.folder, "--baselines", path, "--only", "zip"],
                                   "--only zip"), (["compare", self.folder, "--baselines", path, "--only",
                                                    "("], "--only ("),
                                  (["run", "--baselines", path, "--build",
                                    self.folder / "none"], "make build")):
            done = self.command(*arguments)
            self.assertEqual((done.returncode, done.stderr.count("\n"), done.stdout), (2, 1, ""), done.stderr)
            for part in parts:
                self.assertIn(part, done.stderr)
        for bad, part in ((unknown, "gaol"), ({"case": "x"}, "command")):
            done = self.command("compare", self.folder, "--baselines", self.write(bad))
            self.assertEqual(done.returncode, 2)
            self.assertIn(part, done.stderr)
        self.assertIn("two commands",
                      self.command("compare", self.folder, "--baselines", self.write(case(), two)).stderr)

    def test_publishing_changes_what_was_measured_and_nothing_else(self):
        path = self.write(case(), case(case="other", where={"spec": "fp8"}))
        (self.folder / "hook.json").write_text(json.dumps([row(7.12345)]))
        self.assertEqual(self.command("publish", self.folder, "--baselines", path).returncode, 0)
        first, second = map(json.loads, path.read_text().splitlines())
        self.assertEqual((first["value"], first["goal"], first["device"]), (7.123, 5, check.device_name()))
        self.assertEqual(second, case(case="other", where={"spec": "fp8"}))

    def test_the_published_cases(self):
        cases = check.read_cases(check.BASELINES)
        self.assertEqual(len({c["case"] for c in cases}), len(cases))
        for c in cases:
            self.assertTrue(c["value"] > 0 and 0 < c["noise"] <= 0.25, c["case"])
            self.assertTrue(c["goal"] is None or c["goal"] > 0, c["case"])
            self.assertIn("gradwire-bench", c["command"])


if __name__ == "__main__":
    unittest.main()
