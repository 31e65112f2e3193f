#!/usr/bin/env python3
"""Tests bench/harness/check.py on invented results: which cases pass, fail or are missing. Times nothing."""
import contextlib
import io
import json
import pathlib
import shutil
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
    return {"case": "hook", "step": "hook", "command": ["gradwire-bench", "hook"], "where": {"spec": "bf16"},
            "metric": "speedup", "value": 6.0, "goal": 5, "noise": 0.1, "commit": "abc",
            "device": "another machine", **changed}


def row(speedup, **more):
    return {"spec": "bf16", "speedup": speedup, **more}


def writes(speedup):
    """Returns shell code of a gradwire-bench that writes one row."""
    return ('while [ "$1" != --json ]; do shift; done; '
            f'echo "[{{\\"spec\\": \\"bf16\\", \\"speedup\\": {speedup}}}]" > "$2"\n')


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-check-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_verdicts(self):
        """Goals count everywhere, published values on their device, both less the noise. Faster never fails."""
        here, published = case(device=HERE), case(goal=None)
        for the_case, speedup, verdict in (
                (case(), 5.0, "ok"), (case(), 4.51, "ok"), (case(), 4.49, "NOT MET"),
                (case(), 0.1, "NOT MET"), (here, 5.41, "ok"), (here, 5.39, "SLOWER"),
                (here, 4.49, "NOT MET"), (published, 0.1, "ok"),
                (case(goal=None, device=HERE), 5.3, "SLOWER"), (case(goal=None, device=HERE), 1e6, "ok"),
                (case(value=3.0, device=HERE), 3.0, "NOT MET"),  # published below the goal
                (case(), 1e6, "ok"), (here, 1e6, "ok")):
            self.assertEqual(check.verdict_of(the_case, [row(speedup)], HERE)["verdict"], verdict,
                             (the_case, speedup))
        for rows, why in ((None, "command failed"), ([], "no row with spec=bf16"),
                          ([row(9, spec="fp8")], "no row"), ([row(None)], "speedup is null"),
                          ([{"spec": "bf16"}], "speedup is null"), ([row(float("nan"))], "NaN"),
                          ([row(0)], "speedup is 0"), ([row("fast")], '"fast"')):
            verdict = check.verdict_of(case(), rows, HERE)
            self.assertEqual((verdict["verdict"], verdict["measured"]), ("NOT MEASURED", None))
            self.assertIn(why, verdict["why"])

    def test_ratios_and_the_most_similar_rows_of_a_missing_one(self):
        times = [{"spec": "fp32", "time_us": 300.0, "baseline_time_us": 270.0},
                 {"spec": "bf16", "schedule": "ring", "time_us": 200.0},
                 {"spec": "bf16", "schedule": "tree", "time_us": 100.0}]
        for changed, rows, ratio in (
                ({"metric": "time_us", "over": {"spec": "fp32"}}, times, 3),  # the best of several rows
                ({"metric": "baseline_time_us/time_us", "where": {"spec": "fp32"}}, times, 0.9),
                ({"of": 4}, [row(2), row(3)], 0.75)):
            self.assertEqual(check.measured(case(**changed), rows), ratio)
        with self.assertRaises(check.NotMeasured):
            check.measured(case(metric="time_us", over={"spec": "fp8"}), times)
        rows = [{"op": f"int{bits}_decode", "cache": "warm", "speedup": 9} for bits in range(20)]
        rows.append({"op": "bf16_reduce_encode", "cache": "cold", "speedup": 9})
        verdict = check.verdict_of(case(where={"op": "bf16_encode", "cache": "cold"}), rows, HERE)
        self.assertRegex(verdict["why"], "^no row with op=bf16_encode, cache=cold; the rows are: "
                         "op=bf16_reduce_encode, cache=cold; op=int0_decode, cache=warm; .*; 13 more$")

    def write(self, *cases):
        path = self.folder / "baselines.jsonl"
        path.write_text("".join(json.dumps(c) + "\n" for c in cases))
        return path

    def command(self, code, *arguments, says=()):
        """Runs check.py. Returns what it printed: to standard error if the input is bad."""
        command = [sys.executable, "-B", str(ROOT / "bench/harness/check.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        shown, empty = (done.stderr, "") if code == 2 else (done.stdout, done.stderr)
        self.assertEqual((done.returncode, empty), (code, ""), done.stdout + done.stderr)
        for part in says:
            self.assertIn(part, shown)
        return shown

    def test_judging_and_publishing_a_folder(self):
        path = self.write(case(), case(case="other", where={"spec": "fp8"}),
                          case(case="absent", step="nothing"))
        results, compare = self.folder / "hook.json", ("compare", self.folder, "--baselines", path)
        results.write_text(json.dumps([row(7), row(1, spec="fp8")]))
        self.command(1, *compare, says=("NOT MET", "NOT MEASURED: its command failed",
                                        "1 of 3 cases ok, 2 FAILED"))
        self.command(0, *compare, "--only", "^hook$", "--markdown",
                     says=["| hook | 7 | 5 | 6 elsewhere | 10 % | ok |"])
        results.write_text(json.dumps([row(7.12345)]))
        self.command(0, "publish", self.folder, "--baselines", path)
        first, second, _ = map(json.loads, path.read_text().splitlines())
        self.assertEqual((first["value"], first["goal"], first["device"]), (7.123, 5, check.device_name()))
        self.assertEqual(second, case(case="other", where={"spec": "fp8"}))

    def bench(self, script):
        """Returns a build folder in which gradwire-bench is the given shell script."""
        path = self.folder / "build" / "bin" / "gradwire-bench"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        return path.parents[1]

    def test_a_failing_case_is_measured_once_more_and_the_better_counts(self):
        counted = f'echo x >> {self.folder}/count; n=$(wc -l < {self.folder}/count)\n'
        # In the last row the first measurement is better but too slow. A case that passes is not repeated.
        for script, cases, retries, wanted, runs, told in (
                (writes("$((n * 3))"), [case()], 1, ["ok"], 2, "once more"),
                (writes("$((n * 3))"), [case()], 0, ["NOT MET"], 1, ""),
                ("echo 'it hurts'; exit 3\n", [case()], 1, ["NOT MEASURED"], 2, "FAILED (3): it hurts"),
                (writes("$((5 - n))"), [case(), case(case="easy", goal=1)], 1, ["NOT MET", "ok"], 2, "")):
            (self.folder / "hook.json").write_text(json.dumps([row(9)]))  # of an earlier run
            (self.folder / "count").unlink(missing_ok=True)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                measuring = check.Runs(cases, self.bench(counted + script), self.folder)
                verdicts = [j["verdict"] for j in check.run(cases, measuring, retries, HERE)]
            self.assertEqual((verdicts, (self.folder / "count").read_text()), (wanted, "x\n" * runs), script)
            self.assertIn(told, printed.getvalue())

    def test_a_smoke_run_fails_for_missing_rows_and_has_small_sizes_only(self):
        build = self.bench(f'echo "$@" >> {self.folder}/calls; [ "$1" = hook ] || exit 0\n' + writes(0.001))
        command = ["gradwire-bench", "hook", "--model", "vit_b_32", "--stop", "10", "--compression", "bf16"]
        for spec, code in (("bf17", 1), ("bf16", 0)):
            path = self.write(case(command=command, device=check.device_name(), where={"spec": spec}))
            self.command(code, "run", "--smoke", "--build", build, "--baselines", path,
                         says=["no row with spec=bf17; the rows are: spec=bf16"] * code)
        *_, model, hook = (self.folder / "calls").read_text().splitlines()
        self.assertIn("--model vit_b_32", model, "the name is checked")
        self.assertTrue(hook.startswith("hook --model vit_tiny --stop 1 --compression bf16 --json "), hook)
        self.command(2, "publish", self.folder, "--smoke")

    def test_a_row_fails_that_is_slower_twice_than_another_builds(self):
        for exits, code in (((1, 1), 1), ((1, 0), 0), ((2, 2), 2)):
            count = self.folder / "compared"
            build = self.bench(f'if [ "$1" = compare ]; then echo x >> {count}; echo "row SLOWER"\n'
                               f'  [ $(wc -l < {count}) = 1 ] && exit {exits[0]}; exit {exits[1]}\nfi\n' +
                               writes(9))
            (self.folder / "before").mkdir(exist_ok=True)
            arguments = ("run", "--build", build, "--baselines", self.write(case()), "--out",
                         self.folder / "after", "--against", self.folder / "before")
            if code == 2:
                done = subprocess.run([sys.executable, "-B", str(ROOT / "bench/harness/check.py"),
                                       *map(str, arguments)], capture_output=True)
                self.assertEqual(done.returncode, 2)
                continue
            shown = self.command(code, *arguments, says=["row SLOWER"])
            self.assertEqual(f"SLOWER than in {self.folder}/before: hook" in shown, code == 1)
            self.assertEqual(count.read_text(), "x\n" * 2)
            count.unlink()

    def test_bad_input(self):
        path = self.write(case())
        compare = ("compare", self.folder, "--baselines")
        for *arguments, part in ((*compare, "/nowhere", "/nowhere: No such file"),
                                 (*compare, path, "--only", "zip", "--only zip"),
                                 (*compare, path, "--only", "(", "--only ("),
                                 ("run", "--baselines", path, "--build", self.folder / "none", "make build")):
            self.assertEqual(self.command(2, *arguments, says=[part]).count("\n"), 1)
        for bad, part in (([dict(case(), gaol=3)], "gaol"), ([{"case": "x"}], "command"),
                          ([case(), case(case="b", command=["other"])], "two commands")):
            self.command(2, *compare, self.write(*bad), says=[part])

    def test_the_published_cases(self):
        cases = check.read_cases(check.BASELINES)
        self.assertEqual(len({c["case"] for c in cases}), len(cases))
        for c in cases:
            self.assertTrue(c["value"] > 0 and 0 < c["noise"] <= 0.25, c["case"])
            self.assertTrue(c["goal"] is None or c["goal"] > 0, c["case"])
            self.assertIn("gradwire-bench", c["command"])


if __name__ == "__main__":
    unittest.main()
