#!/usr/bin/env python3
"""Tests bad input to `gradwire train` and `compare`: one line on stderr, exit code 2, and no new file."""
import gzip
import pathlib
import struct

from command import CommandTest, SYNTHETIC, main, synthetic


def idx(shape, values):
    return struct.pack(">I", 0x800 | len(shape)) + b"".join(struct.pack(">I", n)
                                                            for n in shape) + bytes(values)


class BadInput(CommandTest):
    """Names an output file in every call. The file must not exist after the call."""

    def refuse(self, arguments, *parts, env=None):
        before = self.files()
        for command in ("train", "compare"):
            extra = ["--log", "run.jsonl"] if command == "train" else ["--json", "out.json"]
            if command == "compare" and "--compression" not in arguments:
                extra += ["--compression", "fp32"]
            with self.subTest(command=command, arguments=arguments):
                self.assert_refused(self.run_command(command, *arguments, *extra, env=env), *parts)
                self.assertEqual(self.files(), before, "a file was created")

    def write_fashion_mnist(self, train=64, test=32):
        folder = self.folder / "data"
        folder.mkdir(exist_ok=True)
        for prefix, count in (("train", train), ("t10k", test)):
            pixels = bytes((i * 37 + p * 11) % 256 for i in range(count) for p in range(784))
            labels = bytes(i % 10 for i in range(count))
            with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz", "wb") as f:
                f.write(idx((count, 28, 28), pixels))
            with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz", "wb") as f:
                f.write(idx((count,), labels))
        return folder

    def test_missing_dataset(self):
        self.refuse(["--data", f"fashion-mnist:{self.folder}/nowhere"], "nowhere/train-images-idx3-ubyte.gz",
                    "no such file", "dataset-fashion-mnist")
        self.refuse(["--data", f"cifar10:{self.folder}"], "data_batch_1.bin", "no such file",
                    "cifar-10-binary")

    def test_truncated_idx(self):
        data = self.write_fashion_mnist()
        images = data / "train-images-idx3-ubyte.gz"
        images.write_bytes(images.read_bytes()[:200])
        self.refuse(["--data", f"fashion-mnist:{data}"], images, "truncated gzip")
        with gzip.open(images, "wb") as f:
            f.write(idx((64, 28, 28), bytes(64 * 784 - 1)))
        self.refuse(["--data", f"fashion-mnist:{data}"], images, "50175", "50176")

    def test_wrong_magic(self):
        data = self.write_fashion_mnist()
        labels = data / "t10k-labels-idx1-ubyte.gz"
        with gzip.open(labels, "wb") as f:
            f.write(b"\x00\x00\x0c\x01" + bytes(40))
        self.refuse(["--data", f"fashion-mnist:{data}"], labels, "wrong magic number 0x00000c01")

    def test_invalid_specs(self):
        for spec, part in (("powersgd:rank=0", "rank='0'"), ("zip", "unknown method 'zip'"),
                           ("bf16:", "nothing after"), ("", "unknown method ''"),
                           ("fp32:rank=4", "no option 'rank'"), ("bf16:round=up", "nearest|stochastic"),
                           ("powersgd:rank=4,rank=4", "given twice"), ("int9", "did you mean 'int8'?"),
                           ("INT8", "did you mean 'int8'?"), ("powersgd:4", "not key=value, such as rank=4"),
                           ("fp16", "fp16 is not a wire format; bf16 sends as many bytes"),
                           ("fp32,int8", "repeat --compression"),
                           ("topk:ratio=0.01", "k=64,of=4096 is the ratio"),
                           ("int4:blok=64", "did you mean 'block'?")):
            self.refuse(synthetic("--compression", spec), part)
        error = self.run_command("train", "--compression", "int9").stderr
        self.assertLess(len(error), 200)
        self.assertIn("gradwire formats and docs/formats.md list every spec", error)

    def test_suggests_what_the_user_may_have_meant(self):
        for words, meant in (("--model vit-tiny", "vit_tiny"), ("--data fashion_mnist", "fashion-mnist"),
                             ("--data mnist", "fashion-mnist"), ("--optimizer adam", "adamw"),
                             ("--device gpu", "cuda"), ("--device cpu", "host")):
            self.refuse(words.split(), f"did you mean '{meant}'?")
        for flag in ("--steps=2", "--help"):
            self.assert_refused(self.run_command("trian", flag), "'trian'; did you mean 'train'?")
        self.assert_refused(self.run_command("compare", "--seed"), "see gradwire compare --help")
        self.name = "gradwire-bench"
        bench = pathlib.Path(self.program).with_name(self.name)
        if bench.exists():  # sanitizer builds omit it
            self.assert_refused(self.run_words(bench, "kernel"), "'kernel'; did you mean 'kernels'?")

    def test_numbers_and_rates_as_people_write_them(self):
        for steps, number in (("1e3", 1000), ("1k", 1000), ("1M", 1_000_000), ("2.5k", 2500)):
            plan = self.succeed("train", *synthetic("--steps", steps, "--dry-run")).stdout
            self.assertRegex(plan, rf'"?steps"?\W+{number}\b')
        self.refuse(synthetic("--steps", "0.0001k"), "--steps: '0.0001k' is not a whole number")
        for rate in ("1Gbps", "1G", "1Gb/s", "1Gbit/s", "1000Mbps"):
            plan = self.succeed("train", *synthetic("--ranks", 2, "--link", rate, "--dry-run")).stdout
            self.assertIn("Links: emulated, 1Gbit", plan)

    def test_wrong_flags(self):
        for words, parts in (
            (["--stpes", "3"], ["unknown flag '--stpes'; did you mean '--steps'?; see gradwire", " --help"]),
            (["--compresion=int8"], ["unknown flag '--compresion'; did you mean '--compression'?"]),
            (["--frobnicate-all"], ["unknown flag '--frobnicate-all'; see"]),
            (["-x"], ["unknown flag '-x'; see"]), (["word"], ["unexpected argument 'word'"]),
            (["--seed", "1", "--seed", "2"], ["--seed is given 2 times; give it once"]),
            (["--steps", "1", "--epochs", "1"], ["--epochs and --steps cannot be combined"]),
            (["--precision", "x" * 60_000], ["--precision", "..."]),
            (["--graph=maybe"], ["--graph: 'maybe' is not a value of this flag"])):
            self.refuse(words, *parts)

    def test_invalid_links(self):
        for link in ("0", "fast", "-1Gbit", "100", "0.1kbit", "9Tbit", "1Gbit,", "1GBps", "1G,5", "1Gbit,5",
                     "1Gbit,60s"):
            self.refuse(synthetic("--ranks", "2", f"--link={link}"), f"--link {link}: ", "such as")

    def test_schedule_nccl_without_nccl(self):
        self.refuse(synthetic("--ranks", "2", "--device", "host", "--compression", "fp32:schedule=nccl"),
                    "schedule=nccl needs a process with a GPU for each rank", "torchrun", "schedule=auto")

    def test_model_that_does_not_match_the_data(self):
        data = self.write_fashion_mnist()
        self.refuse(["--data", f"fashion-mnist:{data}", "--model", "vit_b_32"], "224x224", "28x28",
                    "--image-size 28", "--data synthetic")
        self.refuse(synthetic("--patch", "5"), "--patch must be one of")
        self.refuse(synthetic("--heads", "3"), "--heads 3")

    def test_invalid_numbers(self):
        for flag, value in (("--ranks", "0"), ("--lr", "nan"), ("--bucket-mb", "0"), ("--bucket-mb", "many"),
                            ("--batch-size", "1e-3"), ("--seed", "-1"), ("--lr", "")):
            self.refuse(synthetic(flag, value), flag)

    def test_unknown_flags_and_words(self):
        self.refuse(synthetic("--precision", "fp8"), "--precision: 'fp8' is not one of fp32, tf32, bf16")
        self.refuse(synthetic("--gelu", "quick"), "--gelu: 'quick' is not one of exact, tanh")
        self.refuse(synthetic("--augment", "rotate"), "--augment 'rotate'", "flip,crop")
        self.assert_refused(self.run_command("train", *SYNTHETIC, "--bucket-mb", "1", "--bucket-mb", "2"),
                            "--bucket-mb")
        self.assert_refused(self.run_command("train", "--seed"), "--seed needs a value: N from 0 to")
        self.assert_refused(self.run_command(), "name a command: train, compare, doctor")
        self.assert_refused(self.run_command("fly"), "fly")
        self.assert_refused(self.run_command("compare", *SYNTHETIC), "--compression")
        for flag in ("--checkpoint", "--resume"):  # ambiguous: compare has several runs
            self.assert_refused(self.run_command("compare", *SYNTHETIC, "--compression", "fp32", flag, "x"),
                                flag)

    def test_no_gpu(self):
        self.refuse(synthetic("--device", "cuda"), "--device cuda", "--device host",
                    env={"CUDA_VISIBLE_DEVICES": ""})

    def test_trace_and_profile(self):
        self.refuse(synthetic("--trace-steps", "2:4"), "--trace-steps 2:4", "on the host", "--trace")
        for steps in ("4", "4:", ":4", "a:b", "4:2", "4:4", "-1:2", "1:2:3"):
            self.refuse(synthetic("--trace", "t.json", "--trace-steps", steps), f"--trace-steps '{steps}'",
                        "a:b")
        self.refuse(synthetic("--trace", "t.json", "--steps", 8, "--trace-steps", "8:9"), "8:9",
                    "steps 0 to 7")
        self.refuse(synthetic("--trace", "nowhere/t.json"), "nowhere", "folder that exists")

    def test_unwritable_log(self):
        (self.folder / "file").write_text("kept")
        for path, part in (("none/run.jsonl", "No such file"), (".", "folder"), ("file/run.jsonl", "")):
            self.assert_refused(self.run_command("train", *SYNTHETIC, "--log", path), path,
                                "cannot be written", part)
            self.assert_refused(
                self.run_command("compare", *SYNTHETIC, "--compression", "fp32", "--json", path), path,
                "cannot be written", part)
        self.assertEqual(self.files(), ["file"])
        self.assertEqual((self.folder / "file").read_text(), "kept")

    def test_bad_input_does_not_change_an_older_log(self):
        (self.folder / "run.jsonl").write_text("of yesterday\n")
        self.assert_refused(
            self.run_command("train", *SYNTHETIC, "--compression", "powersgd:rank=0", "--log", "run.jsonl"))
        self.assertEqual((self.folder / "run.jsonl").read_text(), "of yesterday\n")

    def test_launchers_with_incomplete_variables(self):
        for env in ({"RANK": "0", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
                    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}):
            self.refuse(SYNTHETIC, "the rendezvous is unknown", "MASTER_ADDR", "--rendezvous", env=env)
        self.refuse(synthetic("--ranks", 1), "--ranks 1", "started 4 processes",
                    env={"RANK": "0", "WORLD_SIZE": "4"})
        self.refuse(SYNTHETIC, "each process would train alone", env={
            "RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
        for command in ("train", "doctor"):
            self.assert_refused(self.run_command(command, "--device", "host", env={"RANK": "1"}), "RANK=1",
                                "no variable has the number of ranks")
        self.refuse(synthetic("--rendezvous", "file:///x"), "--rendezvous", "RANK and WORLD_SIZE")
        self.refuse(synthetic("--rendezvous", "x"), "'x'", "tcp://", "file:///",
                    env={"RANK": "0", "WORLD_SIZE": "4"})

    def test_invalid_thread_count(self):
        self.refuse(SYNTHETIC, "GRADWIRE_THREADS='many'", env={"GRADWIRE_THREADS": "many"})


if __name__ == "__main__":
    main()
