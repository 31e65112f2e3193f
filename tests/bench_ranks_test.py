#!/usr/bin/env python3
"""Tests the output, the files and the rejection of bad input of gradwire-bench's measurements of several
ranks."""
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cli"))
from bench import BenchTest, compressions, main  # noqa: E402
from command import as_user  # noqa: E402

# nccl-tests' columns for an operation in place.
STANDARD_COLUMNS = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
QUICK = ["-n", 2, "-w", 1]
SCHEDULES = ["ring", "tree", "two_shot", "hierarchical"]  # the last needs nodes of several ranks


class Collectives(BenchTest):
    def check(self, rows, transport, ranks):
        for row in rows:
            self.assertEqual((row["transport"], row["ranks"], row["wrong"]), (transport, ranks, 0))
            self.assertAlmostEqual(row["algbw_gbps"], row["size_bytes"] / row["time_us"] / 1e3)
            self.assertAlmostEqual(row["effective_busbw_gbps"], row["algbw_gbps"] * 2 * (ranks - 1) / ranks)

    def test_no_format_has_wrong_results(self):
        # Most formats with few bits cannot represent the integers that check exact formats.
        specs = ["int8", "int4", "int2", "natural", "mxfp8", "mxfp4", "sign", "topk", "int4:rotate=hadamard"]
        rows, _ = self.rows("collectives", "--transport", "local", "--ranks", "3", "-b", "64K", "-e", "64K",
                            "--schedule", "two_shot", "--no-baseline", *QUICK, *compressions(*specs))
        self.assertEqual([row["wrong"] for row in rows], [0] * len(specs))

    def test_every_schedule_and_spec_between_threads(self):
        specs = ["fp32", "bf16", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16"]
        rows, out = self.rows("collectives", "--transport", "local", "-b", "1000", "-e", "64K", "-f", "64",
                              *QUICK, *compressions(*specs))
        self.check(rows, "local", 4)
        self.assertEqual([(r["size_bytes"], r["spec"], r["schedule"]) for r in rows],
                         [(size, spec, schedule) for size in (1000, 64000) for spec in specs
                          for schedule in SCHEDULES])
        errors = {
            "fp32": (1e-9, 1e-6), "bf16": (1e-3, 1e-2), "fp8": (1e-2, 1e-1), "powersgd:rank=2": (0.5, 1.1)}
        for row in rows:
            self.assertIsNone(row["baseline_time_us"])
            least, most = errors[row["spec"].removesuffix(",wire=bf16")]
            self.assertTrue(least < row["rel_error"] < most, row)
            if row["spec"] == "fp32":
                self.assertAlmostEqual(row["busbw_gbps"], row["effective_busbw_gbps"])
        large = {(r["schedule"], r["spec"]): r["wire_bytes"] for r in rows if r["size_bytes"] == 64000}
        self.assertEqual(large["ring", "fp32"], 64000 * 2 * 3 / 4)
        self.assertEqual(large["two_shot", "bf16"], 32000 * 2 * 3 / 4)
        self.assertLess(large["ring", "powersgd:rank=2"], large["ring", "fp32"] / 15)
        self.assertEqual(out.count("\n"), 3 + len(rows))

    ONE = ["collectives", "--transport", "local", "--ranks", 3, "-b", "4K", "-e", "4K", "--schedule", "ring",
           "--compression", "bf16"]

    def test_columns_are_those_of_nccl_tests_in_its_order(self):
        for flags, more in (([], []), (["-I", 1], ["i_min", "i_max", "i_p99", "i_cv%"])):
            rows, out = self.rows(*self.ONE, *QUICK, *flags)
            header, units, line = [text for text in out.splitlines()
                                   if not text.startswith(("# 3 ranks", "#   p50"))]
            columns = header.lstrip("# ").split()
            self.assertEqual(columns[:9 + len(more)], STANDARD_COLUMNS + more)
            self.assertEqual(columns[9 + len(more):][:3], ["schedule", "compression", "over"])
            values = line.split()
            self.assertEqual(values[:5] + values[8:9], ["4096", "1024", "float", "avg", "-1", "0"])
            self.assertAlmostEqual(float(values[5]), rows[0]["time_us"], delta=0.06)
            if more:
                self.assertAlmostEqual(float(values[9]), rows[0]["min_us"], delta=0.06)
                self.assertAlmostEqual(float(values[11]), rows[0]["p99_us"], delta=0.06)
            # The columns begin at the same place in all lines.
            self.assertEqual(header.index("#wrong") + 6, line.index(" 0 ") + 2)

    def test_times_of_each_iteration_and_rank(self):
        rows, out = self.rows(*self.ONE, "-n", 12, "-w", 1, "-I", 1, "-K", 2)
        (row,) = rows
        self.assertEqual([rank["rank"] for rank in row["per_rank"]], [0, 1, 2])
        slowest = [max(times) for times in zip(*(rank["times_us"] for rank in row["per_rank"]))]
        self.assertEqual(len(slowest), 12)
        self.assertEqual((row["n"], row["skip"], row["stop"]), (10, 2, "12"))
        self.assertAlmostEqual(row["min_us"], min(slowest[2:]))
        self.assertAlmostEqual(row["max_us"], max(slowest[2:]))
        self.assertAlmostEqual(row["p99_us"], max(slowest[2:]))
        for rank in row["per_rank"]:
            counted = sorted(rank["times_us"][2:])
            self.assertAlmostEqual(rank["p50_us"], (counted[4] + counted[5]) / 2)
            self.assertAlmostEqual(rank["p99_us"], counted[-1])
            self.assertIn(f"{rank['rank']}: {rank['p50_us']:.1f}/{rank['p99_us']:.1f}", out)

    def test_waits_averages_and_misaligned_buffers_change_no_result(self):
        for flags in (["-z", 1], ["-z", 2], ["-z", 3], ["-a", 0], ["-a", 1], ["-a", 2], ["-u", 1],
                      ["-u", 3, "-z", 3, "-I", 1]):
            rows, _ = self.rows(*self.ONE, *QUICK, *flags)
            self.assertEqual([row["wrong"] for row in rows], [0], flags)
            self.assertEqual([rows[0][{"-z": "blocking", "-a": "average", "-u": "unalign"}[flags[0]]]],
                             [flags[1]])

    def test_odd_worlds(self):
        for ranks in (1, 3):
            rows, _ = self.rows("collectives", "--transport", "local", "--ranks", ranks, "-b", "4K", "-e",
                                "4K", *QUICK, "--compression", "bf16")
            self.check(rows, "local", ranks)
            self.assertEqual([r["schedule"] for r in rows], SCHEDULES[:-1])
        rows, _ = self.rows("collectives", "--transport", "local", "--ranks", 20, "-b", "8K", "-e", "8K",
                            *QUICK, "-c", 0, "--compression", "fp32:schedule=tree")
        self.assertEqual([(r["schedule"], r["wrong"], r["rel_error"]) for r in rows], [("tree", None, None)])

    def test_processes_next_to_gloo(self):
        rows, _ = self.rows("collectives", "--transport", "tcp", "--ranks", 2, "-b", "64K", "-e", "64K",
                            *QUICK, "--schedule", "ring", "--compression", "fp32", "--compression",
                            "powersgd:rank=2")
        self.check(rows, "tcp", 2)
        self.assertEqual([r["spec"] for r in rows], ["fp32", "powersgd:rank=2"])
        for row in rows:
            self.assertGreater(row["baseline_time_us"], 0)

    def test_started_by_a_launcher(self):
        outputs = [output for output, _ in self.ends(self.start(
            2, "collectives", "-b", "4K", "-e", "4K", *QUICK, "--schedule", "two_shot", "--no-baseline",
            *compressions("bf16"), "--json", "out.json"))]
        self.assertIn("two_shot", outputs[0])
        self.assertEqual(outputs[1], "")
        rows = self.written()
        self.check(rows, "tcp", 2)
        self.assertIsNone(rows[0]["baseline_time_us"])

    def test_names_the_error_of_a_rank_if_the_parent_ignores_its_children(self):
        result = self.run_words("env", "--ignore-signal=CHLD", self.program, "collectives", "--transport",
                                "tcp", *self.ONE[1:], env={"GRADWIRE_INTERFACE": "none0"})
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 1))
        self.assertIn("no network interface 'none0'", result.stderr)

    def test_a_rank_that_never_comes(self):
        result = self.run_command("collectives", "--timeout-s", "1", "--rendezvous",
                                f"file://{self.folder}/meet", env={"RANK": "0", "WORLD_SIZE": "2"})
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1), result.stderr)
        self.assertIn("rank 1", result.stderr)

    def test_bad_input(self):
        if not pathlib.Path("/dev/nvidia0").exists():
            self.refuse("collectives --transport nccl", "cuda")
        self.refuse("collectives -b 1M -e 4K", "-e 4K", "-b 1M")
        self.refuse("collectives --schedule star", "star", "hierarchical")
        self.refuse("collectives --schedule nccl --compression bf16", "add --compression fp32")
        self.refuse("collectives --schedule nccl", "--transport local", "--transport nccl")
        self.refuse("collectives --schedule hierarchical --ranks 3", "hierarchical", "3 ranks")
        self.refuse("collectives --per-node 3", "--per-node 3", "4 ranks")
        self.refuse("collectives --compression zip", "unknown method 'zip'")
        self.refuse("collectives --transport pigeon", "pigeon", "local, tcp, nccl")
        self.refuse("collectives --device cuda", "--device cuda", env={"CUDA_VISIBLE_DEVICES": ""})
        self.refuse("collectives --transport local", "--transport local", "WORLD_SIZE=2",
                    env={"RANK": "0", "WORLD_SIZE": "2"})
        self.refuse("collectives -n 2 -K 2", "-K 2", "2 calls")
        for text in ("-n 0", "-w -1", "-f 1", "-b two", "--ranks 0", "-a 4", "-z 4", "-u -1", "-I 2"):
            self.refuse(["collectives", *text.split()], text.split()[1])


class ShapedLink(BenchTest):
    """Tests bench/harness/shaped_link.sh, which needs root and network namespaces and reports if either is
    missing."""

    def link(self, *arguments, as_other=()):
        script = "bench/harness/shaped_link.sh"
        process = subprocess.Popen(
            [*(as_other + [script] if as_other else [self.root / script]), *map(str, arguments)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(None))
        stdout, stderr = process.communicate(timeout=120)
        result = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        self.assertEqual(self.namespaces(process), [])
        return result

    def namespaces(self, process):
        if not shutil.which("ip"):
            return []
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if line.startswith(f"gwlink-{process.pid}-")]

    def refused(self, result, *parts):
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for part in ("shaped_link: ", *parts):
            self.assertIn(part, result.stderr)

    def test_bad_input(self):
        self.refused(self.link("--hosts", "4"), "no command")
        self.refused(self.link("--hosts", "many", "--", "true"), "--hosts many")
        self.refused(self.link("--speed", "1", "--", "true"), "--speed")
        self.refused(self.link("--rate"), "--rate needs a value")

    @unittest.skipUnless(os.geteuid() == 0, "dropping root needs root")
    def test_without_root_it_says_so(self):
        self.folder.chmod(0o755)
        self.refused(self.link("--", "true", as_other=as_user(65534, self.folder, self.root)), "root")

    def test_hosts_see_each_other_at_the_rate_and_leave_nothing(self):
        result = self.link("--hosts", "2", "--rate", "200mbit", "--", self.program, "collectives", "-b", "1M",
                           "-e", "1M", *QUICK, "--schedule", "ring", "--compression", "fp32", "--json",
                           self.folder / "out.json")
        if result.returncode == 2 and ("root" in result.stderr or "permit" in result.stderr
                                       or "iproute2" in result.stderr):
            print("shaped_link cannot run here:", result.stderr.strip())
            return
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        row = self.written()[0]
        self.assertEqual((row["ranks"], row["wrong"]), (2, 0))
        # The limit is 200 Mb/s = 25 MB/s. An unshaped burst speeds up the transfer of a megabyte by at most a
        # third.
        self.assertLess(row["busbw_gbps"], 0.034)
        failed = self.link("--hosts", "2", "--", "sh", "-c",
                           'echo "I am $RANK of $WORLD_SIZE"; exit $((RANK * 7))')
        self.assertEqual(failed.returncode, 7)
        self.assertEqual(failed.stdout, "I am 0 of 2\n")
        self.assertIn("[host 1] I am 1 of 2", failed.stderr)
        script = subprocess.Popen([
            self.root / "bench/harness/shaped_link.sh", "--hosts", "2", "--", "sh", "-c",
            "echo up; exec sleep 98765"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.assertEqual(script.stdout.readline(), "up\n")
        self.assertEqual(len(self.namespaces(script)), 3)
        script.terminate()
        self.assertEqual(script.wait(timeout=60), 143)
        script.stdout.close()
        self.assertEqual(self.namespaces(script), [])
        # No process of the namespaces is left.
        self.assertEqual(subprocess.run(["pgrep", "-f", "^sleep 98765$"], capture_output=True).stdout, b"")


class Numerics(BenchTest):
    def test_every_schedule_and_wire(self):
        rows, _ = self.rows("numerics", "--ranks", "2,4", "--elements", 500)
        cases = {(r["ranks"], r["schedule"], r["compression"]): r for r in rows}
        self.assertEqual(len(cases), len(rows))
        # A world of 2 has no nodes of 2 ranks; 4 ranks also have FP32 inside of nodes.
        self.assertEqual(len(rows), (len(SCHEDULES) - 1 + len(SCHEDULES) + 1) * 7)
        self.assertEqual([cases[4, "ring", wire]["lossy_steps"] for wire in ("fp32", "bf16")], [0, 4])
        self.assertEqual(cases[4, "hierarchical,intra_node=fp32", "bf16"]["lossy_steps"], 2)
        for (_, _, wire), row in cases.items():
            self.assertLess(row["rel_error"], {"fp32": 1e-7, "bf16": 6e-3, "fp8": 1e-1,
                                               "int8": 3e-2}[wire.partition(":")[0]], row)

    def test_formats_of_ones_choice(self):
        rows, _ = self.rows("numerics", "--ranks", "2", "--elements", 500, "--spec", "int4:block=32",
                            "--spec", "eden:bits=1")
        self.assertEqual({r["compression"] for r in rows}, {"int4:block=32", "eden:bits=1"})
        self.assertEqual(len(rows), (len(SCHEDULES) - 1) * 2)

    def test_bad_input(self):
        self.refuse("numerics --spec powersgd:rank=4", "powersgd:rank=4", "wire format")
        self.refuse("numerics --spec int5", "int5", "gradwire formats")
        self.refuse("numerics --ranks 66", "--ranks")


if __name__ == "__main__":
    main()
