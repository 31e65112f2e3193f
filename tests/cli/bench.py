"""Helpers for the tests of the real `gradwire-bench` command."""
import json
import os
import pathlib
import re
import sys
import unittest

from command import CommandTest


TIMING = ("n min_us q1_us median_us q3_us iqr_us noise stop stopped sm_mhz throttled")
# The fields of each command's rows, in their order.
FIELDS = {name: fields.split() for name, fields in {
    "step": "model device batch_size compression rounds reducer_ms bypassed_ms graph_ms reducer_ratio "
            "graph_ratio reducer bypassed graph",
    "kernels": f"op variant family device size_bytes shape cache {TIMING} bytes gbps copy_gbps copy_fraction "
               "gflops",
    "formats": "spec bytes_per_element stated_error on device speed_bytes encode_copy_fraction "
               "decode_copy_fraction copy_gbps encode decode",
    "hook": "spec device model elements ms floor_ms copy_gbps extra_bytes baseline baseline_ms speedup "
            f"{TIMING}",
    "orthonormalize": f"model device rank matrices ms baseline baseline_ms speedup {TIMING}",
    "collectives": "schedule spec transport ranks size_bytes time_us algbw_gbps busbw_gbps "
                   f"effective_busbw_gbps wire_bytes wrong rel_error baseline_time_us {TIMING} max_us p99_us "
                   "average blocking unalign skip",
    "numerics": "schedule compression ranks lossy_steps elements rel_error"}.items()}


def compressions(*specs):
    """Returns the flags that ask for these specs."""
    return [word for spec in specs for word in ("--compression", spec)]


class BenchTest(CommandTest):
    name = "gradwire-bench"
    root = pathlib.Path()  # root of the sources, set by main()

    @staticmethod
    def environment(more=None):
        # Cold timings write twice the size of the last-level cache before each sample. On machines with a
        # large cache, each write takes seconds.
        return CommandTest.environment({"GRADWIRE_BENCH_FLUSH_BYTES": str(4 << 20), **(more or {})})

    def rows(self, *arguments):
        """Returns the rows and the output of a successful run with --json. Checks the fields and statistics of
        each row."""
        result = self.run_command(*arguments, "--json", "out.json")
        self.assertEqual(result.returncode, 0, result.stdout[-500:] + result.stderr)
        self.assertEqual(re.sub(r"gradwire-bench: case .* left\n", "", result.stderr), "")
        for row in self.written():
            self.assertEqual([field for field in row if field != "per_rank"], FIELDS[arguments[0]])
            for timing in (row, *row.values()):
                if isinstance(timing, dict) and "min_us" in timing:
                    self.check_timing(timing)
        return self.written(), result.stdout

    def check_timing(self, timing):
        """Checks a measurement's statistics against each other."""
        self.assertEqual([field for field in timing if field in TIMING.split()], TIMING.split())
        quartiles = [timing[field] for field in ("min_us", "q1_us", "median_us", "q3_us")]
        self.assertEqual(quartiles, sorted(quartiles))
        self.assertGreater(quartiles[0], 0)
        self.assertGreaterEqual(timing["n"], 1)
        self.assertAlmostEqual(timing["iqr_us"], timing["q3_us"] - timing["q1_us"])
        self.assertGreaterEqual(timing["noise"], 0)
        self.assertIn(timing["stopped"], ("error", "samples", "time"))

    def written(self):
        return json.loads((self.folder / "out.json").read_text())

    def refuse(self, words, *parts, env=None):
        """Expects the command to be refused: the message contains every part, and no output file exists."""
        words = words.split() if isinstance(words, str) else words
        self.assert_refused(self.run_command(*words, "--json", "out.json", env=env), *parts)
        self.assertFalse((self.folder / "out.json").exists())


def main():
    """Runs the tests of the calling script."""
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} PATH_OF_GRADWIRE_BENCH ROOT_OF_THE_SOURCES [unittest arguments]")
    CommandTest.program = os.path.abspath(sys.argv.pop(1))
    BenchTest.root = pathlib.Path(sys.argv.pop(1))
    unittest.main()
