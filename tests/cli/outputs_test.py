#!/usr/bin/env python3
"""Writes every kind of target with every flag that names an output file. targets.py defines the kinds.

By default, only the fastest command writes every target. The commands train and compare write the targets in
SOME, and other commands write the targets in FEW. With GRADWIRE_FULL_SWEEPS=1, every command writes every
target."""
import json
import os
import pathlib
import shutil
import tempfile

import targets
from command import CommandTest, SYNTHETIC, main

FULL = os.environ.get("GRADWIRE_FULL_SWEEPS") == "1"
SOME = (targets.LongName, targets.Link, targets.HardLinked, targets.Device, targets.Fifo, targets.BindMount,
        targets.FullDisk, targets.FileSizeLimit)
FEW = (targets.Plain, targets.Device, targets.FileSizeLimit)
BENCH = "gradwire-bench"
# Maps the name of a writer to its program, the flags before the file's name, and a word of its output.
WRITERS = {
    "schedules": (BENCH, ["schedules", "--ranks", "2", "--json"], "two_shot"),
    "schedules --check": (BENCH, ["schedules", "--check", "--max-ranks", "2", "--json"], "proven right"),
    "formats": (BENCH, [
        "formats", "--spec", "int8", "--rows", "1", "--elements", "64", "--draws", "2", "--size", "4K",
        "--stop", "0.1ms", "--json"
    ], "int8"),
    "numerics": (BENCH, ["numerics", "--ranks", "2", "--elements", "64", "--spec", "bf16", "--json"], "ring"),
    "kernels": (BENCH, [
        "kernels", "--filter", "bf16", "--device", "host", "--cache", "warm", "--min-size", "4K",
        "--max-size", "4K", "--stop", "0.1ms", "--threads", "1", "--json"
    ], "bf16"),
    "collectives": (BENCH, [
        "collectives", "--transport", "local", "--ranks", "2", "--compression", "fp32", "--schedule", "ring",
        "-b", "1K", "-e", "1K", "-n", "1", "-w", "0", "--json"
    ], "ring"),
    "orthonormalize": (BENCH, [
        "orthonormalize", "--model", "resnet18", "--rank", "1", "--stop", "1", "--device", "host", "--json"
    ], "rank"),
    "hook": (BENCH, [
        "hook", "--model", "resnet18", "--compression", "bf16", "--stop", "1", "--device", "host", "--json"
    ], "bf16"),
    "step": (BENCH, [
        "step", "--model", "vit_tiny", "--batch-size", "1", "--compression", "fp32", "--stop", "10ms",
        "--device", "host", "--json"
    ], "reducer ms"),
    "train --trace": ("gradwire", ["train", *SYNTHETIC, "--steps", "3", "--eval-every", "0",
                                   "--trace"], "per rank at most"),
    "train --log": ("gradwire", ["train", *SYNTHETIC, "--steps", "3", "--eval-every", "0",
                                 "--log"], "per rank at most"),
    "resumed --log": ("gradwire", [
        "train", *SYNTHETIC, "--steps", "3", "--eval-every", "0", "--resume", "saved", "--log"
    ], "per rank at most"),
    "compare": ("gradwire", ["compare", *SYNTHETIC, "--steps", "1", "--compression", "fp32",
                             "--json"], "steps and bytes are medians"),
    "doctor": ("gradwire", ["doctor", "--device", "host", "--json"], "Links: one rank has none"),
}
SLOW = ("doctor", "hook", "orthonormalize")  # take a second per target
LOGS = ("train --log", "resumed --log")


class Outputs(CommandTest):
    def setUp(self):
        super().setUp()
        self.folder.chmod(0o755)  # lets another user reach its targets
        self.may_mount = targets.may_mount()
        self.bin = pathlib.Path(self.program).parent
        self.programs = {name: self.bin / name for name in ("gradwire", BENCH)}
        targets.Target.top = self.bin.parent
        self.run_command("train", *SYNTHETIC, "--steps", 3, "--eval-every", 0, "--checkpoint", "saved",
                         "--checkpoint-every", 2, "--log", "first.jsonl")
        shutil.rmtree(self.folder / "saved" / "step-000000003")

    def try_one(self, name, kind):
        program, words, table = WRITERS[name]
        if kind.needs_root and not self.may_mount:
            return 0
        if name in LOGS and kind in (targets.StandardOutput, targets.StandardOutputByName, targets.FullDisk):
            return 0  # text and log share a stream; truncating the old log frees room for a short one
        if kind is targets.StandardOutputByName and name != "schedules":
            return 0
        folder = tempfile.mkdtemp(dir=self.folder)
        os.chmod(folder, 0o755)
        target = kind(folder)
        other_user = issubclass(kind, targets.InAFolderOfAnother)
        first = (self.folder / "first.jsonl").read_text()
        if name == "resumed --log" and isinstance(target,
                                                  targets.Plain) and target.path.exists() and not target.code:
            (target.source if kind is targets.BindMount else target.path).write_text(first)
        expected = target.code
        if other_user and name == "compare" and expected == 0:
            expected, target.error = 2, "out.0.jsonl: cannot be written: folder"  # of the runs' logs
        if name == "compare" and kind is targets.FullDisk:
            target.error = None  # a log's error precedes the target's
        if name in LOGS and kind is targets.FileSizeLimit:
            # The size limit truncates the log to no lines.
            target.check = lambda _test: self.assertEqual(os.listdir(folder), ["out.json"])
        if name == "compare" and kind is targets.FileSizeLimit:
            target.check = lambda _test: self.assertEqual(os.listdir(folder), ["out.0.jsonl"])
        if name == "compare" and kind is targets.LongName:
            expected, target.error = 2, "File name too long"  # the runs' log names
            target.check = lambda _test: self.assertEqual(os.listdir(folder), [])
        command = [f"bin/{program}"] if other_user else [self.programs[program]]
        result = self.run_words(*target.wrapper, *command, *words, target.path, timeout=120,
                                pass_fds=target.pass_fds)
        written = None
        if kind is not targets.FullDisk:
            written = target.written(result.stdout) if expected == 0 else None
        self.assertEqual(result.returncode, expected, f"{result.stdout[-300:]} {result.stderr[-600:]}")
        if expected == 0:
            self.assertEqual(result.stderr, "")
        else:
            self.assertIn(target.error or "", result.stderr)
            self.assertIn(str(target.path).removesuffix(".json"), result.stderr)
        printed = written if kind is targets.StandardOutputByName else result.stdout
        if expected != 2:
            self.assertIn(table, printed)
        else:
            self.assertNotIn(table, printed)
        if written is not None:
            self.check_contents(name, kind, written)
        target.check(self)
        left = [p.name for p in pathlib.Path(folder).rglob(".gradwire-*")]
        self.assertEqual(left, [], "temporary files remain")
        return 1

    def check_contents(self, name, kind, text):
        if name in LOGS:
            records = [json.loads(line) for line in text.splitlines()]
            self.assertEqual(records[-1]["type"], "summary")
            steps = [r["step"] for r in records if r["type"] == "step"]
            continued = name == "resumed --log" and records[1]["type"] == "step" and records[1]["step"] == 0
            self.assertEqual(steps, [2] if name == "resumed --log" and not continued else [0, 1, 2])
            return
        if kind in (targets.StandardOutput, targets.StandardOutputByName):
            at = min(text.index(start) for start in ("\n[", "\n{") if start in text)
            text = text[at:]
        document = json.loads(text)
        self.assertTrue(document)
        if name == "train --trace":
            self.assertIn("traceEvents", document)

    def test_every_writer_and_target(self):
        cases = 0
        for name in WRITERS:
            for kind in targets.all_targets():
                chosen = SOME if WRITERS[name][0] == "gradwire" else FEW
                fastest = name == "schedules" or (name == "train --trace"
                                                  and kind is targets.ProcessSubstitution)
                if not (FULL or fastest or (kind in chosen and name not in SLOW) or kind is targets.Plain):
                    continue
                with self.subTest(writer=name, target=kind.__name__):
                    cases += self.try_one(name, kind)
        print(f"{cases} cases of writer and target")

    def test_a_dash_is_standard_output_without_other_text(self):
        for name, (program, words, table) in WRITERS.items():
            if name in SLOW and not FULL:
                continue
            with self.subTest(writer=name):
                result = self.run_words(self.programs[program], *words, "-", timeout=120)
                self.check_contents(name, None, result.stdout)
                self.assertIn(table, result.stderr)
        page = self.run_command("report", "first.jsonl", "-o", "-")
        self.assertEqual((page.returncode, page.stderr), (0, ""))
        self.assertRegex(page.stdout, r"(?s)^<!doctype html>.*</html>\s*$")

    def test_rejects_a_fifo_without_a_reader(self):
        os.mkfifo(self.folder / "fifo")
        for name in ("schedules", "train --log") if FULL else ("schedules",):
            program, words, table = WRITERS[name]
            result = self.run_words(self.programs[program], *words, "fifo", timeout=60)
            self.assertEqual((result.returncode, table in result.stdout), (2, False))
            self.assertIn("no process has opened this FIFO for reading within 10 s", result.stderr)

    def test_training_continues_when_the_reader_of_its_log_exits(self):
        read, write = os.pipe()
        flags = [*SYNTHETIC, "--steps", "2000", "--eval-every", "0"]
        process = self.spawn(self.program, "train", *flags, "--log", f"/dev/fd/{write}", pass_fds=(write, ))
        os.close(write)
        os.read(read, 1)
        os.close(read)
        out, error = process.communicate(timeout=60)
        self.assertIn("per rank at most", out)
        self.assertEqual(process.returncode, 1)
        self.assertIn("Broken pipe; the run continues without this file", error)
        self.assertEqual(len(error.splitlines()), 1)

    def test_training_continues_without_a_log_that_fills_the_disk(self):
        if not self.may_mount:
            self.skipTest("needs root and mount namespaces")
        (self.folder / "disk").mkdir()
        script = (
            'mount -t tmpfs -o size=16k none disk; "$@" || code=$?; cp disk/run.jsonl after.jsonl; exit'
            " ${code:-0}"
        )
        result = self.run_words("unshare", "-m", "sh", "-ec", script, "sh", self.program, "train", *SYNTHETIC,
                                "--steps", 100, "--eval-every", 0, "--log", "disk/run.jsonl", "--trace",
                                "disk/trace.json", "--dump-gradients", "99:disk/gradients")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("per rank at most", result.stdout)
        self.assertNotIn("Trace of steps", result.stdout)
        self.assertNotIn("Gradients of step", result.stdout)
        self.assertEqual(len(result.stderr.splitlines()), 3, result.stderr)
        for line in result.stderr.splitlines():
            self.assertIn("No space left on device; the run continues without this file", line)
        self.assertGreater(len(self.records("after.jsonl")), 5)  # all lines are complete

    def test_training_and_reports_do_not_need_proc(self):
        if not self.may_mount:
            self.skipTest("needs root and mount namespaces")
        without_origin = {"LD_ORIGIN_PATH": str(pathlib.Path(self.program).resolve().parent)}
        for words in (["train", *SYNTHETIC, "--steps", 2, "--log", "run.jsonl"],
                      ["report", "run.jsonl", "-o", "page.html"]):
            result = self.run_words("unshare", "-m", "sh", "-ec", 'mount -t tmpfs no /proc; exec "$@"', "sh",
                                    self.program, *words, env=without_origin)
            self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_runs_continue_when_old_checkpoints_cannot_be_removed(self):
        if not self.may_mount:
            self.skipTest("needs root and mount namespaces")
        flags = [
            *SYNTHETIC, "--eval-every", "0", "--checkpoint", "saved", "--checkpoint-every", "2",
            "--checkpoint-keep", "1"
        ]
        run = f'"{self.program}" train ' + " ".join(flags)
        cases = {  # the setup of the folder, the warning, and the files at the end
            # A folder of the lower layer can be removed but not renamed.
            "overlayfs": (
                (
                    "mkdir m up work; mount -t tmpfs none m; mkdir m/up m/work; mount -t overlay -o "
                    "lowerdir=saved,upperdir=m/up,workdir=m/work none saved"
                ),
                "",
                ["step-000000008"],
            ),
            "read-only": (
                (
                    "mount --bind saved/step-000000002 saved/step-000000002; "
                    "mount -o remount,bind,ro saved/step-000000002"
                ),
                "saved/step-000000002: an old checkpoint cannot be removed",
                ["step-000000002", "step-000000008"],
            ),
        }
        for name, (setup, warning, left) in cases.items():
            with self.subTest(name):
                script = (
                    f"{setup}; {run} --resume saved --steps 6; {run} --resume saved --steps 8 --lr 0.001; ls"
                    " saved"
                )
                folder = self.folder / name
                folder.mkdir()
                shutil.copytree(self.folder / "saved", folder / "saved")
                result = self.run_words("unshare", "-m", "sh", "-ec", script, cwd=folder)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual([w for w in result.stdout.splitlines() if w.startswith("step-")], left)
                self.assertEqual(result.stderr.count(warning), 2 if warning else 1 + len(result.stderr),
                                 result.stderr)

    def test_two_runs_cannot_write_one_log(self):
        flags = ["train", *SYNTHETIC, "--eval-every", "0", "--log", "run.jsonl"]
        first = self.train_until(1, *flags, "--steps", 1000000)
        self.assert_refused(self.run_command(*flags, "--steps", 3), "run.jsonl",
                            "another run is writing to it")
        self.assert_refused(self.run_command(*flags, "--steps", 3, "--resume", "saved"),
                            "another run is writing to it")
        first.kill()
        first.wait()
        self.assertEqual(self.run_command(*flags, "--steps", 3).returncode, 0)
        self.assertEqual(self.run_command(*flags, "--steps", 3, "--resume", "saved").returncode, 0)

if __name__ == "__main__":
    main()
