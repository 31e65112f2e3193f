#!/usr/bin/env python3
"""Tests paths and sizes as users write them: ~ where shells do not expand it, URLs, '-', relative file://,
negative sizes."""
import os
import pathlib
import re

from command import CommandTest, main, synthetic


def bytes_in(line):
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return [float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+) (B|kB|MB|GB)\b", line)]


class Paths(CommandTest):
    def arguments(self, program):
        """Returns the arguments of each command in the help: (name, type, about). A path without a flag is in
        capitals."""
        whole = self.run_words(program, "--help").stdout
        commands = re.findall(r"^  ([a-z]+)\b", whole.partition("Commands:")[2].partition("\n\n")[0], re.M)
        return {command: re.findall(r"^  (?:-\w,)?(--\S+|[A-Z]+) ([^\s=]*)(.*(?:\n   .*)*)",
                                    self.run_words(program, command, "--help").stdout, re.M)
                for command in commands}

    def test_every_path_rejects_texts_that_name_no_file(self):
        prefixes = {"FILE": "", "DIR": "", "DATA": "cifar10:", "STEP:DIR": "0:", "URL": "file://"}
        results = {"--json", "--csv", "--markdown", "--log", "--trace", "--output"}
        tried = set()
        for self.name in ("gradwire", "gradwire-bench"):
            program = pathlib.Path(self.program).parent / self.name
            for command, arguments in self.arguments(program).items():
                for name, kind, about in arguments:
                    if kind not in prefixes and name.startswith("-"):
                        if kind != "SPEC":  # a new flag with a path needs a type of `prefixes`
                            self.assertNotRegex(about, r"(?i)\b(file|folder|path)\b", (command, name))
                        continue
                    tried.add(name)
                    required = {other: "2" for other, _, more in arguments if "(required" in more}
                    for bad in ("~/here", "s3://b/run", "-")[:2 if name in results else 3]:
                        given = {**required, name: prefixes.get(kind, "") + bad}
                        words = [f"{key}={value}" if key[0] == "-" else value for key, value in given.items()]
                        words += ["--elastic=1:2"] if name in ("--members", "--join") else []
                        with self.subTest(words=[self.name, command, *words]):
                            result = self.run_words(program, command, *words)
                            self.assert_refused(result, f"'{bad}' ", f"'./{bad}'", name)
        self.assertEqual(tried, {*results, "--checkpoint", "--resume", "--init", "--members", "--join",
                                 "--data", "--cluster", "--dump-gradients", "--rendezvous", "--tensorboard",
                                 "--gradients", "RUN", "FILE", "LOG", "A", "B"})
        self.assertEqual(self.files(), [])

    def test_variables_with_paths_reject_texts_that_name_no_file(self):
        train = ["train", *synthetic("--steps", 1)]
        (self.folder / "log").write_text("")
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for bad in ("~nobody", "~", "gs://bucket/x", "file:///tmp/x", "-"):
            for name, command in (("GRADWIRE_DATA", ["train", "--device", "host"]),
                                  ("GRADWIRE_PYTHON", ["report", "log"]), ("GRADWIRE_SECRET_FILE", train),
                                  ("auto:plan", [*train, "--compression", f"auto:plan={bad}"])):
                self.assert_refused(self.run_command(*command, env={**ranks, name: bad}), name, f"'{bad}' ")
        self.assertEqual(self.run_command(*train, "--log=./~").returncode, 0)
        self.assertEqual(self.files(), ["log", "~"])

    def test_no_result_may_be_another_file_of_its_command(self):
        (self.folder / "one").write_text("{}")
        os.link(self.folder / "one", self.folder / "two")
        for self.name, *words in (("gradwire", "train", "--log=-", "--trace=-"),
                                  ("gradwire", "compare", "--json=one", "--trace=two"),
                                  ("gradwire", "plan", "--cluster=one", "--ranks=2", "--json=two"),
                                  ("gradwire", "report", "x", "one", "--output=two"),
                                  ("gradwire", "train", *synthetic(), "--ranks=2",
                                   "--compression=auto:plan=one", "--log=two"),
                                  ("gradwire-bench", "compare", "one", "x", "--markdown=two")):
            result = self.run_words(pathlib.Path(self.program).parent / self.name, *words)
            self.assert_refused(result, "are the same file")
        self.assertEqual((self.folder / "one").read_text(), "{}")

    def test_missing_named_data_is_not_replaced(self):
        empty = self.folder / "empty"
        empty.mkdir()
        self.assert_refused(
            self.run_command("train", "--steps", 1, "--device", "host", env={"GRADWIRE_DATA": str(empty)}),
            f"GRADWIRE_DATA is '{empty}'", "FashionMNIST/raw")
        doctor = self.run_command("doctor", env={"GRADWIRE_DATA": str(empty)})
        self.assertIn(f"GRADWIRE_DATA is '{empty}'", doctor.stdout)

    def test_rejects_a_relative_file_rendezvous_and_names_the_absolute_one(self):
        for rank in (0, 1):
            result = self.run_command("train", *synthetic("--steps", 1), "--rendezvous", "file://meet",
                                      env={"RANK": str(rank), "WORLD_SIZE": "2"})
            self.assert_refused(result, "'file://meet'", f"file://{self.folder.resolve()}/meet")
        self.assertEqual(self.files(), [])

    def test_sizes(self):
        for size in ("-1", "-5G", "-0.5", "+1", "", "1X", "G", "0x10", "1e9"):
            self.assert_refused(self.run_command("train", *synthetic("--steps", 1), f"--memory-limit={size}"),
                                "--memory-limit")
        self.assert_refused(self.run_command("train", "--memory-limit=8GBs"), "'8GBs' is not a size; write")
        for size in ("1000000000", "8G", "8 GiB", "500m"):
            self.succeed("train", *synthetic("--steps", 1), "--dry-run",
                         f"--memory-limit={size}")

    def test_the_memory_limit_counts_evaluation(self):
        run = ["train", *synthetic("--data", "synthetic:640", "--steps", 2)]
        self.assert_refused(self.run_command(*run, "--memory-limit", "1M"),
                            "evaluation", "--eval-every")
        self.assertEqual(self.run_command(*run, "--memory-limit", "1M", "--eval-every", 0).returncode, 0)
        plan, end = (self.run_command(*run, *extra).stdout for extra in (("--dry-run", ), ()))
        planned = sum(
            bytes_in(next(line for line in plan.splitlines() if line.startswith("Memory per rank"))))
        peak, = bytes_in(next(line for line in end.splitlines() if line.startswith("  memory")))
        self.assertLess(abs(planned - peak), 0.05 * peak, (plan, end))


if __name__ == "__main__":
    main()
