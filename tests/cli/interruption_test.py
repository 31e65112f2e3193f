#!/usr/bin/env python3
"""Tests signals: the message names what was kept, its command continues the run, and the exit status is the
signal's, also in process 1 of a container."""
import os
import re
import resource
import shlex
import signal
import subprocess
import time
import unittest

from command import CommandTest, SYNTHETIC, main, synthetic


class Interruption(CommandTest):
    def interrupt(self, run, number=signal.SIGINT):
        """Sends the signal. Returns the message, after checking that the signal ended the process."""
        run.send_signal(number)
        _, message = run.communicate(timeout=60)
        self.assertEqual(run.returncode, -number)
        name = signal.Signals(number).name
        self.assertTrue(message.startswith(f"gradwire: interrupted by {name}; "), message)
        return message

    def begin(self, *arguments, until="step 3/", **options):
        """Starts a command. Returns once it has printed `until`."""
        run = self.spawn(self.program, *arguments, **options)
        while until not in (line := run.stdout.readline()):
            self.assertTrue(line, run.stderr.read() if run.poll() is not None else "")
        return run

    def continue_with(self, message):
        """Runs the command that the message names. Returns its output."""
        command = re.search(r":\n  (.*)\n$", message)[1]
        done = self.run_words(*shlex.split(command))
        self.assertEqual((done.returncode, done.stderr), (0, ""), command)
        return done.stdout

    def test_train_names_the_checkpoint_and_continues(self):
        steps = ["--epochs", 1000]
        folder = "a folder"
        run = self.begin("train", *synthetic(*steps, "--checkpoint", folder, "--checkpoint-every", 3,
                                             "--checkpoint-keep", 2, "--log", "run.jsonl"), until="step 9/")
        message = self.interrupt(run)
        self.assertRegex(message, r"kept a folder/step-\d+ and run.jsonl; continue with:\n")
        self.assertIn("--resume 'a folder'\n", message)
        again = self.begin(*shlex.split(message.splitlines()[1])[1:], until="Resuming from a folder/step-")
        while "step " not in again.stdout.readline():
            self.assertIsNone(again.poll())
        # An interruption before the next checkpoint names the previous one, and one --resume.
        message = self.interrupt(again, signal.SIGTERM)
        self.assertRegex(message, "kept a folder/step-")
        self.assertEqual(message.count("--resume"), 1)

    def test_the_command_of_train_ends_the_run(self):
        arguments = synthetic("--steps", 400, "--ranks", 2, "--checkpoint", "runs", "--checkpoint-every", 2)
        message = self.interrupt(self.begin("train", *arguments, until="step 5/"))
        self.assertIn("Resuming from runs/step-", self.continue_with(message))

    def test_without_a_checkpoint_the_message_says_so(self):
        steps = ["--epochs", 1000]
        message = self.interrupt(self.begin("train", *synthetic(*steps)))
        self.assertIn("nothing was kept", message)
        self.assertIn("--checkpoint DIR --resume DIR", message)
        message = self.interrupt(self.begin("train", *synthetic(*steps, "--checkpoint", "runs",
                                                                "--checkpoint-every", 9000)))
        self.assertIn("no checkpoint yet, the first would be after 9000 steps", message)

    def test_compare_continues_with_the_runs_that_are_left(self):
        specs = ["--compression", "fp32", "--compression", "bf16", "--steps", 200, "--ranks", 2]
        run = self.begin("compare", *SYNTHETIC, *specs, "--json", "out.json", until="[2/2] bf16")
        message = self.interrupt(run)
        self.assertIn("kept 1 of 2 runs next to out.json; continue with:\n", message)
        out = self.continue_with(message)
        self.assertIn("[1/2] fp32: already done", out)
        self.assertIn("compression  ", out)
        message = self.interrupt(self.begin("compare", *SYNTHETIC, *specs))
        self.assertIn("nothing was kept; with --json FILE", message)

    def test_an_ignored_signal_stays_ignored(self):
        run = self.spawn("sh", "-c", 'trap "" INT; exec "$@"', "sh", self.program, "train",
                         *synthetic("--steps", 100))
        while "step 3/" not in run.stdout.readline():
            self.assertIsNone(run.poll())
        run.send_signal(signal.SIGINT)
        out, error = run.communicate(timeout=120)
        self.assertEqual((run.returncode, error), (0, ""))

    def test_every_signal_ends_with_a_word(self):
        for name in ("HUP", "USR1", "USR2", "ALRM", "XCPU", "TERM"):
            with self.subTest(name):
                run = self.begin("train", *synthetic("--epochs", 1000))
                resource.prlimit(run.pid, resource.RLIMIT_CORE, (0, 0))
                self.interrupt(run, getattr(signal, f"SIG{name}"))

    def test_a_blocked_signal_of_the_parent_ends_the_run(self):
        block = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        run = self.spawn(self.program, "train", *synthetic("--epochs", 1000), preexec_fn=block)
        while "step 3/" not in run.stdout.readline():
            self.assertIsNone(run.poll())
        self.interrupt(run, signal.SIGTERM)

    def test_nobody_reads_standard_error(self):
        for numbers in ((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGTERM,)):
            read, write = os.pipe()
            os.set_blocking(write, False)
            while True:
                try:
                    os.write(write, b"x")
                except BlockingIOError:
                    break
            os.set_blocking(write, True)
            run = self.begin("train", *synthetic("--epochs", 100000), stderr=write)
            for number in numbers:
                run.send_signal(number)
            self.assertIn(-run.wait(timeout=30), numbers)
            os.close(read), os.close(write)

    def test_a_last_checkpoint(self):
        for ranks, number, to in ((1, signal.SIGTERM, (0,)), (2, signal.SIGTERM, (0, 1)),
                                  (2, signal.SIGUSR1, (1,)), (2, signal.SIGTERM, (0,))):
            with self.subTest(ranks=ranks, to=to):
                folder = f"{number.name}-{ranks}-{len(to)}"
                flags = synthetic("--epochs", 100000, "--checkpoint", folder, "--checkpoint-every", 10 ** 9,
                                  "--log", log := f"{folder}.jsonl", "--compression", "int8")
                runs = self.start(ranks, "train", *flags) if ranks > 1 else [self.begin(
                    "train", *flags, "--ranks", 2)]
                while "step 40/" not in runs[0].stdout.readline():
                    self.assertIsNone(runs[0].poll())
                for rank in to:
                    runs[rank].send_signal(number)
                errors = [run.communicate(timeout=60)[1] for run in runs]
                self.assertEqual([run.returncode for run in runs], [-number] * ranks, errors)
                self.assertEqual(errors[1:], [""] * (ranks - 1))
                path = re.search(rf"kept ({folder}/step-(\d+)) and {log}; ", errors[0])
                self.assertEqual(self.records(log)[-1]["path"], path[1])
                self.assertEqual(self.records(log)[-2]["step"] + 1, int(path[2]))
                again = self.spawn(self.program, "train", *flags, "--ranks", 2, "--resume", folder)
                while f"step {int(path[2]) + 1}/" not in (line := again.stdout.readline()):
                    self.assertTrue(line)
                again.kill()

    def test_a_second_signal_does_not_wait_for_the_checkpoint(self):
        ranks = self.start(2, "train", *synthetic("--epochs", 100000, "--checkpoint", "runs"))
        while "step 3/" not in ranks[0].stdout.readline():
            self.assertIsNone(ranks[0].poll())
        ranks[1].send_signal(signal.SIGSTOP)  # rank 0's step does not end
        ranks[0].send_signal(signal.SIGTERM)
        time.sleep(2.5)
        self.assertIsNone(ranks[0].poll())
        self.interrupt(ranks[0], signal.SIGTERM)

    @unittest.skipUnless(os.geteuid() == 0, "only root can make a process 1")
    def test_process_1_of_a_container_ends(self):
        slow = self.folder / "slow"
        slow.write_text("#!/bin/sh\nexec sleep 300\n")
        slow.chmod(0o755)
        (self.folder / "r.jsonl").write_text('{"type": "run"}\n')
        rank_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29811"}
        run = ["train", *synthetic("--epochs", 100000)]
        checkpoint = ["--checkpoint", "runs", "--resume", "runs", "--checkpoint-every", 10 ** 9]
        for words, variables in ((run, {}), ([*run, *checkpoint], {}), (["doctor"], rank_1),
                                 (run, rank_1), (["report", "r.jsonl"], {"GRADWIRE_PYTHON": str(slow)})):
            for number in (signal.SIGTERM, signal.SIGINT):
                with self.subTest(words=words, variables=variables, number=number):
                    saves = words[-len(checkpoint):] == checkpoint
                    log = self.folder / f"log.{number}"
                    outer = self.spawn("unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
                                       self.program, *words, *(("--log", log) if saves else ()),
                                       env=variables, stdout=subprocess.DEVNULL)
                    inner = self.process_1(outer, number)
                    time.sleep(0.5)  # at any moment
                    end = time.monotonic() + 60
                    while saves and time.monotonic() < end:  # a run saves a checkpoint after its first step
                        if log.exists() and '"step"' in log.read_text():
                            break
                        time.sleep(0.02)
                    os.kill(inner, number)
                    self.assertEqual(outer.wait(timeout=30), 128 + number)
        self.assertTrue(list(self.folder.glob("runs/step-*/model.safetensors")))

    def process_1(self, outer, number):
        """Returns the process that `unshare` has started, once it handles the signal."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for pid in subprocess.run(["pgrep", "-P", str(outer.pid)], capture_output=True).stdout.split():
                with open(f"/proc/{int(pid)}/status") as status:
                    caught = next(line for line in status if line.startswith("SigCgt"))
                if int(caught.split()[1], 16) >> (number - 1) & 1:
                    return int(pid)
            time.sleep(0.02)
        self.fail("no process handles the signal")


if __name__ == "__main__":
    main()
