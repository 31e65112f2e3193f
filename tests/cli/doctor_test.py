#!/usr/bin/env python3
"""Tests `gradwire doctor`, and --help and --version of every command."""
import json
import pathlib
import re

from command import CommandTest, main


class Doctor(CommandTest):
    def test_describes_the_machine(self):
        result = self.run_command("doctor")
        self.assertEqual(result.returncode, 0)
        for word in ("Host", "CUDA", "threads", "SIMD", "BLAS", "compiler", "fashion-mnist", "launcher",
                     "Network", "Peaks"):
            self.assertIn(word, result.stdout)
        self.assertRegex(result.stdout, r"BLAS +OpenBLAS [0-9.]+, \w+ kernels")
        self.assert_refused(self.run_command("doctor", "--json", "/nowhere/x.json"), "/nowhere")
        self.assert_refused(self.run_command("doctor", "--model", "vit_z"), "vit_z")

    def test_warns_of_slow_products(self):
        fma_share = self.peaks()["fma_share"]
        if fma_share is None:  # the CPU lacks AVX2, or the build is sanitized
            return
        slow = self.peaks(GRADWIRE_BLAS_KERNELS="Prescott", says="unset GRADWIRE_BLAS_KERNELS=Prescott")
        self.assertLess(slow["fma_share"], 0.6)
        self.assertGreater(fma_share, slow["fma_share"])
        self.assert_refused(self.run_command("doctor", env={"GRADWIRE_BLAS_KERNELS": "Nonsense"}),
                            "GRADWIRE_BLAS_KERNELS=Nonsense", "Haswell")

    def peaks(self, says="", **variables):
        result = self.succeed("doctor", "--device", "host", "--json", "doctor.json", env=variables)
        self.assertIn(says, result.stdout)
        return json.loads((self.folder / "doctor.json").read_text())["peaks"]

    def test_help_and_version(self):
        for arguments in (["--help"], ["train", "--help"], ["compare", "--help"], ["--version"]):
            result = self.succeed(*arguments)
            self.assertIn("gradwire", result.stdout.lower())
        for words, same in (("help plan", "plan --help"), ("help", "--help"), ("version", "--version")):
            self.assertEqual(self.succeed(*words.split()).stdout, self.succeed(*same.split()).stdout)
        alone = self.run_command()
        self.assertEqual((alone.returncode, alone.stdout), (2, self.succeed("--help").stdout))

    def test_help_fits_the_terminal_and_has_examples(self):
        for program in ("gradwire", "gradwire-bench"):
            path = pathlib.Path(self.program).with_name(program)
            if not path.exists():
                continue  # sanitizer builds omit gradwire-bench
            whole = self.run_words(path, "--help").stdout
            listed = whole.partition("\nCommands:\n")[2].partition("\n\n")[0]
            commands = re.findall(r"^  ([a-z]+) ", listed, re.M)
            self.assertIn("formats", commands)
            for command in ("", *commands):
                pages = {}
                for columns in (60, 100, 500):
                    words = [path, *command.split(), "--help"]
                    page = self.run_words(*words, env={"COLUMNS": str(columns)}).stdout
                    for line in [text for text in page.splitlines() if len(text.split()) > 1]:
                        self.assertLessEqual(len(line), min(columns, 110), (command, line))
                    pages[columns] = re.sub(r"\s+", " ", page.replace(" \\\n", ""))
                self.assertEqual(len(set(pages.values())), 1, "words are not cut")
                self.assertNotRegex(page, r"INT|FLOAT|TEXT:| in \[", command)
                examples = page.replace("\\\n", "").partition("Examples:\n")[2].strip().splitlines()
                self.assertEqual(len(examples), 3 if program == "gradwire" or not command else 0, page)
                self.assertEqual([line for line in examples if "gradwire" not in line], [])
        for command in ("train", "compare", "plan"):
            headings = re.findall(r"^([A-Z]\w+):$", self.succeed(command, "--help").stdout, re.M)
            self.assertEqual(headings[:2], ["Options", "Compression"])

    def test_a_link_without_a_second_rank_is_noted(self):
        self.assertIn("Note: --link has no effect on a single rank",
                      self.succeed("doctor", "--device", "host", "--link", "1Gbps").stdout)


if __name__ == "__main__":
    main()
