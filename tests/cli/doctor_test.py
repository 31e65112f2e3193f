#!/usr/bin/env python3
"""Tests `gradwire doctor`, and --help and --version of every command."""
import json

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


if __name__ == "__main__":
    main()
