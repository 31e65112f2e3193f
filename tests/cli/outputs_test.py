#!/usr/bin/env python3
"""Writes every kind of target with every flag that names an output file. targets.py defines the kinds.

By default, only the fastest command writes every target. The commands train and compare write the targets in
SOME, and other commands write the targets in FEW. With GRADWIRE_FULL_SWEEPS=1, every command writes every
target."""
import json
import os
import pathlib
import shutil
import stat
import tempfile

import targets
from command import CommandTest, SYNTHETIC, main

FULL = os.environ.get("GRADWIRE_FULL_SWEEPS") == "1"
SOME = (targets.long_name, targets.link, targets.hard_linked, targets.device, targets.fifo,
        targets.bind_mount, targets.full_disk, targets.file_size_limit)
FEW = (targets.device, targets.file_size_limit)
STREAMS = (targets.standard_output, targets.standard_output_by_name)
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
        targets.top = self.bin.parent
        self.run_command("train", *SYNTHETIC, "--steps", 3, "--eval-every", 0, "--checkpoint", "saved",
                         "--checkpoint-every", 2, "--log", "first.jsonl")
        shutil.rmtree(self.folder / "saved" / "step-000000003")

    def expected(self, name, kind, folder):
        """Returns the target of a writer, which has other ends for some kinds."""
        target = kind(folder)
        if name == "resumed --log" and target.code == 0 and os.path.isfile(target.path):
            file = target.contents or target.path
            file.write_text((self.folder / "first.jsonl").read_text())
        if name == "train --log" and target.code == 0 and os.path.isfile(target.path):
            (target.contents or target.path).write_text("")  # train overwrites no log
        if name in LOGS and kind is targets.file_size_limit:  # which truncates the log to no lines
            return target._replace(made="out.json")
        if name == "compare":  # of the runs' logs
            if kind is targets.long_name:
                return target._replace(code=2, error="File name too long", made="")
            if target.user and target.code == 0:
                return target._replace(code=2, error="out.0.jsonl: cannot be written: folder")
            if target.user:
                return target._replace(error="")  # a log's error precedes the target's
        return target

    def try_one(self, name, kind):
        program, words, table = WRITERS[name]
        if kind in targets.NEED_ROOT and not self.may_mount:
            return 0
        if name in LOGS and kind in (*STREAMS, targets.full_disk):
            return 0  # text and log share a stream; truncating the old log frees room for a short one
        if kind is targets.standard_output_by_name and name != "schedules":
            return 0
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        folder.chmod(0o755)
        target = self.expected(name, kind, folder)
        before = targets.snapshot(folder, target)
        command = [f"bin/{program}"] if target.user else [self.programs[program]]
        result = self.run_words(*target.wrapper, *command, *words, target.path, timeout=120,
                                pass_fds=target.pass_fds)
        self.assertEqual(result.returncode, target.code, f"{result.stdout[-300:]} {result.stderr[-600:]}")
        written = target.written(result.stdout) if target.code == 0 else None
        if target.code == 0:
            self.assertEqual(result.stderr, "")
        else:
            self.assertIn(target.error, result.stderr)
            self.assertIn(str(target.path).removesuffix(".json"), result.stderr)
        printed = written if kind is targets.standard_output_by_name else result.stdout
        self.assertEqual(table in printed, target.code != 2)
        if written is not None:
            self.check_contents(name, kind, written)
        after = targets.snapshot(folder, target)
        logs = [after.pop(log) for log in list(after) if name == "compare" and log.endswith(".0.jsonl")]
        self.assertLessEqual(len(logs), 1)
        made = {n: after.pop(n)[0] for n in after.keys() - before.keys()}
        self.assertEqual((after, list(made)), (before, [target.made] * bool(target.made)))
        self.assertTrue(all(map(stat.S_ISREG, made.values())))
        if kind is targets.full_disk:
            self.assertEqual((folder / "after").read_text(), targets.BEFORE)
        return 1

    def check_contents(self, name, kind, text):
        if name in LOGS:
            records = [json.loads(line) for line in text.splitlines()]
            self.assertEqual(records[-1]["type"], "summary")
            steps = [r["step"] for r in records if r["type"] == "step"]
            continued = name == "resumed --log" and records[1]["type"] == "step" and records[1]["step"] == 0
            self.assertEqual(steps, [2] if name == "resumed --log" and not continued else [0, 1, 2])
            return
        if kind in STREAMS:
            at = min(text.index(start) for start in ("\n[", "\n{") if start in text)
            text = text[at:]
        document = json.loads(text)
        self.assertTrue(document)
        if name == "train --trace":
            self.assertIn("traceEvents", document)

    def test_every_writer_and_target(self):
        cases = 0
        for name in WRITERS:
            for kind in targets.ALL:
                chosen = SOME if WRITERS[name][0] == "gradwire" else FEW
                fastest = name == "schedules" or (name == "train --trace"
                                                  and kind is targets.process_substitution)
                if not (FULL or fastest or (kind in chosen and name not in SLOW) or kind is targets.plain):
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
        page = self.succeed("report", "first.jsonl", "-o", "-")
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
        script = ('mount -t tmpfs -o size=16k none disk; "$@" || code=$?; cp disk/run.jsonl after.jsonl; exit'
                  " ${code:-0}")
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
        flags = [*SYNTHETIC, "--eval-every", "0", "--checkpoint", "saved", "--checkpoint-every", "2",
                 "--checkpoint-keep", "1"]
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
                    " saved")
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
        self.assert_refused(self.run_command(*flags, "--steps", 3, "--resume", "saved"),
                            "another run is writing to it")
        first.kill()
        first.wait()
        self.assertEqual(self.run_command(*flags, "--steps", 3, "--resume", "saved").returncode, 0)

    def test_a_new_run_refuses_a_log_that_is_not_empty(self):
        flags = ["train", *SYNTHETIC, "--steps", 3, "--log"]
        before = (self.folder / "first.jsonl").read_bytes()
        (self.folder / "link").symlink_to("first.jsonl")
        for log in ("first.jsonl", "link"):
            self.assert_refused(self.run_command(*flags, log), f"--log {log}: the file is not empty",
                                "name another file, or remove")
            self.succeed(*flags, log, "--dry-run")
        self.assertEqual((self.folder / "first.jsonl").read_bytes(), before)
        # A command that is repeated until the run ends may find no checkpoint yet.
        shown = self.succeed(*flags, "first.jsonl", "--checkpoint", "new", "--resume", "new").stdout
        self.assertIn("first.jsonl was not empty; first.jsonl.1 has its contents now", shown)
        self.assertEqual((self.folder / "first.jsonl.1").read_bytes(), before)
        with open(self.folder / "all", "w") as out:  # which is not empty when the run begins
            self.run_words(self.program, *flags, "/dev/stdout", stdout=out)
        self.assertIn('{"type":"summary"', (self.folder / "all").read_text())


if __name__ == "__main__":
    main()
