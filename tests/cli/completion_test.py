#!/usr/bin/env python3
"""Tests the completion scripts in real shells, the man pages, and the examples of `train` without flags."""
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import time
import unittest

from command import CommandTest, main

TAB, ALL, SHOW = "\t", "\x1b*", "\x18"  # complete; insert all completions (bash); print the line


class Shell:
    """An interactive shell on a terminal."""

    def __init__(self, words, start, folder, environment):
        self.leader, follower = pty.openpty()
        self.process = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, cwd=folder,
                                        env={**environment, "TERM": "xterm"}, start_new_session=True)
        os.close(follower)
        self.send(start + "\necho READY-$((1 + 1))\n")
        self.read_until("READY-2")

    def send(self, text):
        os.write(self.leader, text.encode())

    def read_until(self, pattern):
        shown, end = "", time.monotonic() + 60
        while not (match := re.search(pattern, shown, re.S)):
            assert time.monotonic() < end, f"no {pattern!r} in {shown!r}"
            if select.select([self.leader], [], [], 1)[0]:
                shown += os.read(self.leader, 65536).decode(errors="replace")
        return match

    def line_after(self, keys):
        """Returns the command line after typing the keys, and clears the line."""
        self.send(keys + SHOW)
        line = self.read_until("LINE<(.*?)>")[1]
        self.send("\x15")  # kill the line
        return re.sub(r"\s+", " ", line)

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


class Completion(CommandTest):
    def setUp(self):
        super().setUp()
        bench = pathlib.Path(self.program).parent / "gradwire-bench"
        self.programs = [self.program, *([str(bench)] if bench.exists() else [])]

    def path(self):
        folders = {str(pathlib.Path(program).parent) for program in self.programs}
        return {"PATH": ":".join([*folders, os.environ["PATH"]])}

    def sources(self, shell):
        return "".join(f"source <({pathlib.Path(program).name} completion {shell})\n"
                       for program in self.programs)

    def bash(self):
        # The key prints the line with a newline first, since the shell redraws the line afterwards.
        start = f"""PS1='$ '; bind 'set enable-bracketed-paste off'
bind -x '"\\C-x": printf "\\nLINE<%s>\\n" "$READLINE_LINE"'
""" + self.sources("bash")
        shell = Shell(["bash", "--norc", "--noprofile", "-i"], start, self.folder,
                      self.environment(self.path()))
        self.addCleanup(shell.end)
        return shell

    def words(self, shell, line):
        """Returns all completions of the line's last word."""
        return shell.line_after(line + ALL)[len(line.rpartition(" ")[0]) + 1:].split()

    def test_bash_completes_commands_flags_and_values(self):
        (self.folder / "runs").mkdir()
        (self.folder / "run.jsonl").write_text("")
        shell = self.bash()
        self.assertEqual(shell.line_after("gradwire tra" + TAB), "gradwire train ")
        self.assertEqual(shell.line_after("gradwire train --batch" + TAB), "gradwire train --batch-size ")
        self.assertEqual(self.words(shell, "gradwire train --device "), ["auto", "cuda", "host"])
        self.assertEqual(self.words(shell, "gradwire train --device=h"), ["--device=host"])
        self.assertEqual(self.words(shell, "gradwire train --lr 1 --model vit_b"), ["vit_b_16", "vit_b_32"])
        self.assertEqual(self.words(shell, "gradwire compare --gather-weights "), [])  # a flag of train only
        self.assertIn("fp8", self.words(shell, "gradwire train --gather-weights "))
        self.assertEqual(self.words(shell, "gradwire train --ranks "), [])
        self.assertEqual(self.words(shell, "gradwire train --log r"), ["run.jsonl", "runs"])
        self.assertEqual(shell.line_after("gradwire train --checkpoint r" + TAB),
                         "gradwire train --checkpoint runs/")
        self.assertEqual(self.words(shell, "gradwire top r"), ["run.jsonl", "runs"])
        self.assertEqual(self.words(shell, "gradwire completion "), ["bash", "zsh"])

    def test_bash_completes_compression_specs(self):
        shell = self.bash()
        line = "gradwire compare --compression "
        self.assertEqual(shell.line_after(line + "power" + TAB), line + "powersgd ")
        self.assertEqual(shell.line_after(line + "powersgd:ran" + TAB), line + "powersgd:rank=")
        self.assertEqual(shell.line_after(line + "powersgd:rank=4,schedule=tw" + TAB),
                         line + "powersgd:rank=4,schedule=two_shot ")
        self.assertEqual(shell.line_after(line + "fp8:round=s" + TAB), line + "fp8:round=stochastic ")
        names = self.words(shell, line)
        grammar = self.run_command("train", "--compression", "zip").stderr
        formats = re.search(r"where FORMAT is ([a-z0-9|]+)", grammar)[1].split("|")
        self.assertEqual(set(names), {*formats, "auto", "powersgd", "randk"})
        self.assertEqual(shell.line_after(line + "auto:er" + TAB), line + "auto:error=")
        self.assertEqual(shell.line_after(line + "randk:rat" + TAB), line + "randk:ratio=")

    def test_models_and_datasets_exist(self):
        shell = self.bash()
        models = self.words(shell, "gradwire train --model ")
        self.assertEqual(len(models), 6)
        for model in models:
            result = self.run_command("train", "--dry-run", "--model", model, "--data", "synthetic:64",
                                      "--batch-size", 1)
            self.assertNotIn("unknown model", result.stderr)
        for data in self.words(shell, "gradwire train --data "):
            result = self.run_command("train", "--dry-run", "--data", data.rstrip(":"), "--steps", 1)
            self.assertNotIn("unknown", result.stderr)

    def flags(self, program, *command):
        text = self.run_words(program, *command, "--help").stdout
        names = [name for names in re.findall(r"^  (-\S+)", text, re.M) for name in names.split(",")]
        return {name for name in names if name.startswith("--")}

    def commands(self, program):
        text = self.run_words(program, "--help").stdout
        return re.findall(r"^  ([a-z]+)\b", text[text.index("Subcommands:"):], re.M)

    def test_bash_completes_every_command_and_flag_of_the_help(self):
        shell = self.bash()
        for program in self.programs:
            name = pathlib.Path(program).name
            commands = self.commands(program)
            self.assertGreaterEqual(len(commands), 7)
            self.assertEqual(set(self.words(shell, f"{name} ")), set(commands))
            for command in commands:
                words = set(self.words(shell, f"{name} {command} --"))
                self.assertEqual(words, self.flags(program, command), f"{name} {command}")

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh_completes_commands_flags_and_values(self):
        start = "PS1='$ '; unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D\n"
        start += "show() { print -r -- \"\nLINE<$BUFFER>\" }; zle -N show; bindkey '^X' show\n"
        start += self.sources("zsh")
        shell = Shell(["zsh", "-f", "-i"], start, self.folder, self.environment(self.path()))
        self.addCleanup(shell.end)
        for typed, line in (
            ("gradwire tra", "gradwire train "), ("gradwire train --batch", "gradwire train --batch-size"),
            ("gradwire train --device ho", "gradwire train --device host "),
            ("gradwire train --model vit_t", "gradwire train --model vit_tiny "),
            ("gradwire compare --compression power", "gradwire compare --compression powersgd"),
            ("gradwire compare --compression powersgd:rank=4,schedule=tw",
             "gradwire compare --compression powersgd:rank=4,schedule=two_shot"),
            ("gradwire completion z", "gradwire completion zsh ")
        ):
            with self.subTest(typed=typed):
                self.assertEqual(shell.line_after(typed + TAB).rstrip(" ="), line.rstrip())

    def test_man_pages_have_every_flag_of_the_help(self):
        for program in self.programs:
            name = pathlib.Path(program).name
            folder = self.folder / name
            self.assertEqual(self.run_words(program, "man", folder).returncode, 0)
            commands = self.commands(program)
            self.assertEqual({page.name
                              for page in folder.iterdir()},
                             {f"{name}.1", *(f"{name}-{command}.1" for command in commands)})
            for command in commands:
                page = (folder / f"{name}-{command}.1").read_text().replace("\\-", "-")
                for flag in self.flags(program, command):
                    self.assertIn(f"\\fB{flag}\\fR", page)
            self.check_troff(folder)

    def check_troff(self, folder):
        for page in folder.iterdir():
            for number, line in enumerate(page.read_text().splitlines(), 1):
                if line.startswith("."):
                    self.assertRegex(line, r"^\.(TH|SH|SS|TP|BR|br|nf|fi)( |$)", f"{page}:{number}")
                self.assertFalse(line.startswith("'"), f"{page}:{number}")
            if shutil.which("groff"):
                drawn = subprocess.run(["groff", "-man", "-Tutf8", "-ww", page], capture_output=True,
                                       text=True)
                self.assertEqual((drawn.returncode, drawn.stderr), (0, ""), page)
                self.assertIn("NAME", re.sub(".\b", "", drawn.stdout))  # bold letters are printed twice

    def test_train_without_flags_shows_examples_that_work(self):
        result = self.run_command("train")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("gradwire train --help", result.stderr.splitlines()[0])
        examples = re.findall(r"^  gradwire (train .*?)(?: +#.*)?$", result.stderr, re.M)
        self.assertEqual(len(examples), 3)
        for example in examples:
            self.assertEqual(self.run_command(*example.split(), "--dry-run").returncode, 0, example)
        self.assertEqual(self.files(), [])


if __name__ == "__main__":
    main()
