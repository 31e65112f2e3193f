#!/usr/bin/env python3
"""Tests the stop rule, the files and the comparison of gradwire-bench's results."""
import csv
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cli"))
from bench import BenchTest, main  # noqa: E402

KERNEL = ["kernels", "--device", "host", "--threads", 1, "--filter", "fp8_decode", "--min-size", "4K",
          "--max-size", "4K", "--cache", "warm"]


class StopRules(BenchTest):
    def measured(self, stop):
        return self.rows(*KERNEL, "--stop", stop)[0][0]

    def test_a_number_is_the_number_of_samples(self):
        row = self.measured("7")
        self.assertEqual((row["n"], row["stop"], row["stopped"]), (7, "7", "samples"))

    def test_a_time_ends_a_measurement_after_three_samples_at_the_earliest(self):
        row = self.measured("0s")
        self.assertEqual((row["n"], row["stop"], row["stopped"]), (3, "0s", "time"))

    def test_the_error_ends_a_measurement_that_has_enough_samples(self):
        row = self.measured("error=100%,samples=12,min=0s")
        self.assertEqual((row["n"], row["stopped"]), (12, "error"))
        self.assertEqual(row["stop"], "error=100%,samples=12,min=0s,max=15s")

    def test_the_longest_time_wins_over_the_error(self):
        row = self.measured("error=0%,max=1ms")
        self.assertEqual((row["stop"], row["stopped"]), ("error=0%,samples=10,min=1ms,max=1ms", "time"))

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

    def test_unwritable_files(self):
        for flag in ("--csv", "--markdown"):
            self.refuse([*KERNEL, flag, "none/out"], "none/out")


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

    def test_few_samples_decide_nothing(self):
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
        result = self.run_command("compare", "a.json", "a.json")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
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
