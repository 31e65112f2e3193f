#!/usr/bin/env python3
"""Tests closed standard input, output and error, and pipes without a reader. Logs, checkpoints and
connections keep their contents, and the exit code is correct."""
import itertools
import json
import os
import pathlib
import signal
import subprocess

from command import CommandTest, SYNTHETIC, main


def closing(descriptors):
    def close():
        for d in descriptors:
            os.close(d)
    return close


class Descriptors(CommandTest):
    def end_of(self, process):
        process.wait(timeout=240)
        return process.returncode

    def begin(self, *arguments, closed=(), folder=None, **variables):
        process = subprocess.Popen([self.program, *map(str, arguments)], env=self.environment(variables),
                                   cwd=folder or self.folder, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   preexec_fn=closing(closed))
        self.addCleanup(process.kill)
        return process

    def check_log(self, folder, steps):
        records = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
        self.assertEqual([r["step"] for r in records if r["type"] == "step"], list(range(steps)))
        self.assertEqual(records[-1]["type"], "summary")

    def test_any_closed_descriptors(self):
        runs = []
        for n in range(4):
            for closed in itertools.combinations(range(3), n):
                folder = self.folder / ("closed" + "".join(map(str, closed)))
                folder.mkdir()
                flags = ("--steps", 3, "--log", "run.jsonl", "--checkpoint", "saved", "--trace", "trace.json")
                runs.append((folder, self.begin("train", *SYNTHETIC, *flags, closed=closed, folder=folder)))
        for folder, run in runs:
            self.assertEqual(self.end_of(run), 0, folder.name)
            self.check_log(folder, 3)
            json.loads((folder / "trace.json").read_text())
            resumed = self.run_command("train", *SYNTHETIC, "--steps", 4, "--resume", folder / "saved")
            self.assertEqual(resumed.returncode, 0, f"{folder.name}: {resumed.stderr}")

    def test_processes_with_all_descriptors_closed(self):
        ranks = [self.begin("train", *SYNTHETIC, "--steps", 20, "--log", "run.jsonl", "--rendezvous",
                            f"file://{self.folder}/meeting", closed=(0, 1, 2), RANK=str(r), WORLD_SIZE="3")
                 for r in range(3)]
        self.assertEqual([self.end_of(r) for r in ranks], [0, 0, 0])
        self.check_log(self.folder, 20)

    def test_pipes_without_readers(self):
        for gone in ("stdout", "stderr"):
            name = f"{gone}.jsonl"
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, gone: subprocess.PIPE}
            run = subprocess.Popen([
                self.program, "train", *SYNTHETIC, "--steps", "40", "--log", name, "--checkpoint",
                f"saved-{gone}"], env=self.environment(), cwd=self.folder, **streams)
            getattr(run, gone).close()
            self.assertEqual(self.end_of(run), 128 + signal.SIGPIPE if gone == "stdout" else 0, gone)
            self.assertEqual(self.records(name)[-1]["type"], "summary")
            self.assertTrue((self.folder / f"saved-{gone}" / "step-000000040").exists())

    def test_a_reader_that_ends_early_is_no_error(self):
        for self.name, words in (("gradwire", "formats"), ("gradwire-bench", "formats --list")):
            program = pathlib.Path(self.program).with_name(self.name)
            script = f"set -o pipefail; {program} {words} | true"
            result = self.run_words("bash", "-c", script)
            self.assertIn(result.returncode, (0, 128 + signal.SIGPIPE))
            self.assertEqual(result.stderr, "")

    def test_reports_a_full_disk(self):
        with open("/dev/full", "w") as full:
            run = self.run_words(self.program, "train", *SYNTHETIC, "--steps", 2, stdout=full)
        self.assertEqual(run.returncode, 1)
        self.assertIn("standard output could not be written: is its disk full?", run.stderr)

    def test_an_error_without_standard_error_keeps_its_code(self):
        self.assertEqual(self.end_of(self.begin("train", "--steps", "none", closed=(0, 1, 2))), 2)

    def test_the_benchmark_program(self):
        bench = pathlib.Path(self.program).with_name("gradwire-bench")
        if not bench.exists():
            self.skipTest("gradwire-bench is not built")
        words = [bench, "schedules", "--json", "out.json"]
        run = subprocess.run(words, env=self.environment(), cwd=self.folder, preexec_fn=closing((0, 1, 2)),
                             timeout=240)
        self.assertEqual(run.returncode, 0)
        json.loads((self.folder / "out.json").read_text())


if __name__ == "__main__":
    main()
