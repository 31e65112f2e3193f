#!/usr/bin/env python3
"""Tests Ctrl-C and SIGTERM: the message names what was kept, and its command continues the run."""
import re
import shlex
import signal

from command import CommandTest, SYNTHETIC, main, synthetic


class Interruption(CommandTest):
    def interrupt(self, run, number=signal.SIGINT):
        """Sends the signal. Returns the message, after checking that the signal ended the process."""
        run.send_signal(number)
        _, message = run.communicate(timeout=60)
        self.assertEqual(run.returncode, -number)
        self.assertTrue(message.startswith("gradwire: interrupted; "), message)
        return message

    def begin(self, *arguments, until="step 3/"):
        """Starts a command. Returns once it has printed `until`."""
        run = self.spawn(self.program, *arguments)
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


if __name__ == "__main__":
    main()
