#!/usr/bin/env python3
"""Tests paths and sizes as users write them: ~ where shells do not expand it, relative file://, negative
sizes."""
import re

from command import CommandTest, main, synthetic


def bytes_in(line):
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return [float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+) (B|kB|MB|GB)\b", line)]


class Paths(CommandTest):
    def test_every_flag_rejects_an_unexpanded_tilde(self):
        train, compare = ["train", *synthetic("--steps", 1)
                          ], ["compare", *synthetic("--steps", 1), "--compression", "fp32"]
        flags = [(train, flag) for flag in ("--log", "--trace", "--checkpoint", "--resume", "--init")]
        flags += [([*train, "--elastic", "1:2"], flag) for flag in ("--members", "--join")]
        flags += [(compare, flag) for flag in ("--json", "--trace", "--init")]
        flags += [(["doctor"], "--json")]
        for command, flag in flags:
            for path in ("~/here", "~", "~nobody/here"):
                with self.subTest(command=command[0], flag=flag, path=path):
                    self.assert_refused(self.run_command(*command, f"{flag}={path}"), flag,
                                        f"'{path}' begins with ~", f"'./{path}'")
        for flag, value in (("--data", "fashion-mnist:~/data"), ("--data", "cifar10:~/data"),
                            ("--dump-gradients", "0:~/here"), ("--rendezvous", "file://~/meet")):
            command = ["train", *synthetic("--steps", 1, flag, value)]
            self.assert_refused(self.run_command(*command), flag, "begins with ~", '"$HOME/')
        self.assert_refused(self.run_command("top", "~/run.jsonl"), "begins with ~")
        self.assert_refused(
            self.run_command("train", "--steps", 1, "--device", "host", env={"GRADWIRE_DATA": "~/data"}),
            "GRADWIRE_DATA", "begins with ~")
        self.assertEqual([str(path) for path in self.folder.iterdir()], [])
        self.assertEqual(self.run_command(*train, "--log=./~").returncode, 0)
        self.assertEqual(self.files(), ["~"])

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
        for size in ("1000000000", "8G", "8 GiB", "500m"):
            result = self.run_command("train", *synthetic("--steps", 1), "--dry-run",
                                      f"--memory-limit={size}")
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_the_memory_limit_counts_evaluation(self):
        run = ["train", *synthetic("--data", "synthetic:640", "--steps", 2)]
        self.assert_refused(self.run_command(*run, "--memory-limit", "1M"),
                            "evaluation", "--eval-every")
        self.assertEqual(self.run_command(*run, "--memory-limit", "1M", "--eval-every", 0).returncode, 0)
        plan, end = (self.run_command(*run, *extra).stdout for extra in (("--dry-run", ), ()))
        planned = sum(
            bytes_in(next(line for line in plan.splitlines() if line.startswith("Memory per rank"))))
        peak, = bytes_in(next(line for line in end.splitlines() if line.startswith("Memory:")))
        self.assertLess(abs(planned - peak), 0.05 * peak, (plan, end))


if __name__ == "__main__":
    main()
