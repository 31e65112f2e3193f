#!/usr/bin/env python3
"""Runs the real `gradwire` command: what it does with good input, and that bad input ends in one line and code 2."""
import gzip
import json
import os
import pathlib
import pty
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import unittest

GRADWIRE = ""  # path of the executable, from the command line
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
                      "PMI_SIZE", "GRADWIRE_DATA")
SMALL = ["--device", "host", "--width", "16", "--depth", "1", "--heads", "2", "--mlp", "32"]
SYNTHETIC = ["--data", "synthetic:256", "--batch-size", "16", *SMALL]


def synthetic(*extra):
    """SYNTHETIC with more flags, those given replacing those there: a flag given twice is an error of its own."""
    extra = [str(word) for word in extra]
    kept = [word for i in range(0, len(SYNTHETIC), 2) if SYNTHETIC[i] not in extra for word in SYNTHETIC[i:i + 2]]
    return kept + extra


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def idx(shape, values):
    return struct.pack(">I", 0x800 | len(shape)) + b"".join(struct.pack(">I", n) for n in shape) + bytes(values)


class CommandTest(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-cli-"))
        self.addCleanup(shutil.rmtree, self.folder)

    @staticmethod
    def environment(more=None):
        clean = {k: v for k, v in os.environ.items()
                 if k not in LAUNCHER_VARIABLES and not k.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_"))}
        clean.update(more or {})
        return clean

    def run_command(self, *arguments, env=None):
        return subprocess.run([GRADWIRE, *map(str, arguments)], capture_output=True, text=True,
                              env=self.environment(env), cwd=self.folder, timeout=240)

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())

    def assert_refused(self, result, *parts):
        """Code 2, exactly one line on stderr that holds every part, and nothing that looks like a crash."""
        self.assertEqual(result.returncode, 2, f"{result.args}: {result.stdout[-300:]} {result.stderr[-300:]}")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("gradwire: "), lines[0])
        for part in parts:
            self.assertIn(str(part), lines[0])

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


class BadInput(CommandTest):
    """The log is named in every call, and must not be there afterwards."""

    def refuse(self, arguments, *parts, env=None):
        before = self.files()
        for command in ("train", "compare"):
            extra = ["--log", "run.jsonl"] if command == "train" else ["--json", "out.json"]
            if command == "compare" and "--compression" not in arguments:
                extra += ["--compression", "fp32"]
            with self.subTest(command=command, arguments=arguments):
                self.assert_refused(self.run_command(command, *arguments, *extra, env=env), *parts)
                self.assertEqual(self.files(), before, "a file was left behind")

    def test_missing_dataset(self):
        self.refuse(["--data", f"fashion-mnist:{self.folder}/nowhere"], "nowhere/train-images-idx3-ubyte.gz",
                    "no such file", "dataset-fashion-mnist")
        self.refuse(["--data", f"cifar10:{self.folder}"], "data_batch_1.bin", "no such file", "cifar-10-binary")

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

    def test_unknown_model(self):
        self.refuse(["--model", "vit_giant"], "unknown model 'vit_giant'", "vit_tiny", "vit_l_32")

    def test_bad_specs(self):
        for spec, part in (("powersgd:rank=0", "rank='0'"), ("zip", "unknown method 'zip'"), ("bf16:", "nothing after"),
                           ("", "unknown method ''"), ("fp32:rank=4", "no option 'rank'"),
                           ("bf16:round=up", "nearest|stochastic"), ("powersgd:rank=4,rank=4", "given twice")):
            self.refuse(synthetic("--compression", spec), part)

    def test_batch_larger_than_the_shard(self):
        self.refuse(synthetic("--ranks", "4", "--batch-size", "65"), "--batch-size 65", "64 for each of 4 ranks",
                    "--batch-size 64 or less")

    def test_model_that_does_not_fit_the_data(self):
        data = self.write_fashion_mnist()
        self.refuse(["--data", f"fashion-mnist:{data}", "--model", "vit_b_32"], "224x224", "28x28", "--image-size 28")
        self.refuse(synthetic("--patch", "5"), "--patch must be one of")
        self.refuse(synthetic("--heads", "3"), "--heads 3")

    def test_wrong_numbers(self):
        for flag, value in (("--ranks", "0"), ("--ranks", "-1"), ("--batch-size", "0"), ("--steps", "0"), ("--epochs", "-1"),
                            ("--epochs", "nan"), ("--lr", "nan"), ("--bucket-mb", "0"), ("--bucket-mb", "many"), ("--timeout-s", "0"),
                            ("--warmup", "-1"), ("--accumulate", "0"), ("--log-every", "0"), ("--ranks", "two"),
                            ("--batch-size", "1e3"), ("--seed", "-1"), ("--lr", "")):
            self.refuse(synthetic(flag, value), flag)

    def test_unknown_flags_and_words(self):
        for flag in ("--frobnicate",):
            self.refuse(synthetic(flag, "x"), flag)
        self.refuse(synthetic("--precision", "fp8"), "--precision 'fp8'")
        self.refuse(synthetic("--augment", "rotate"), "--augment 'rotate'", "flip,crop")
        self.refuse(synthetic("--gradient-views", "maybe"), "--gradient-views 'maybe'", "on, off")
        self.assert_refused(self.run_command("train", *SYNTHETIC, "--bucket-mb", "1", "--bucket-mb", "2"), "--bucket-mb")
        self.refuse([*SYNTHETIC, "--ranks", "1", "--ranks", "2"], "--ranks")
        self.assert_refused(self.run_command(), "subcommand")
        self.assert_refused(self.run_command("fly"), "fly")
        self.assert_refused(self.run_command("compare", *SYNTHETIC), "--compression")
        for flag in ("--checkpoint", "--resume"):  # of which run?
            self.assert_refused(self.run_command("compare", *SYNTHETIC, "--compression", "fp32", flag, "x"), flag)

    def test_no_gpu(self):
        self.refuse(synthetic("--device", "cuda"), "--device cuda", "--device host",
                    env={"CUDA_VISIBLE_DEVICES": ""})

    def test_trace_and_profile(self):
        self.refuse(synthetic("--trace-steps", "2:4"), "--trace-steps 2:4", "--trace FILE")
        for steps in ("4", "4:", ":4", "a:b", "4:2", "4:4", "-1:2", "1:2:3"):
            self.refuse(synthetic("--trace", "t.json", "--trace-steps", steps), f"--trace-steps '{steps}'", "a:b")
        self.refuse(synthetic("--trace", "t.json", "--steps", 8, "--trace-steps", "8:9"), "8:9", "steps 0 to 7")
        self.refuse(synthetic("--profile-steps", "2:4"), "--profile-steps 2:4", "on the host", "--trace")
        self.refuse(synthetic("--trace", "nowhere/t.json"), "nowhere", "folder that exists")

    def test_unwritable_log(self):
        (self.folder / "file").write_text("kept")
        for path, part in (("none/run.jsonl", "No such file"), (".", "folder"), ("file/run.jsonl", "")):
            self.assert_refused(self.run_command("train", *SYNTHETIC, "--log", path), path, "cannot be written", part)
            self.assert_refused(self.run_command("compare", *SYNTHETIC, "--compression", "fp32", "--json", path), path,
                                "cannot be written", part)
        self.assertEqual(self.files(), ["file"])
        self.assertEqual((self.folder / "file").read_text(), "kept")

    def test_bad_input_leaves_an_older_log_alone(self):
        (self.folder / "run.jsonl").write_text("of yesterday\n")
        self.assert_refused(self.run_command("train", *SYNTHETIC, "--compression", "powersgd:rank=0", "--log", "run.jsonl"))
        self.assertEqual((self.folder / "run.jsonl").read_text(), "of yesterday\n")

    def test_launchers_that_leave_something_open(self):
        for env in ({"RANK": "0", "WORLD_SIZE": "4"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
                    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}):
            self.refuse(SYNTHETIC, "nothing says where they meet", "MASTER_ADDR", "--rendezvous", env=env)
        self.refuse(synthetic("--ranks", 1), "--ranks 1", "started 4 processes", env={"RANK": "0", "WORLD_SIZE": "4"})
        self.refuse(SYNTHETIC, "each process would train alone", env={
            "RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
        self.refuse(synthetic("--rendezvous", "file:///x"), "--rendezvous", "RANK and WORLD_SIZE")
        self.refuse(synthetic("--rendezvous", "x"), "'x'", "tcp://", "file:///",
                    env={"RANK": "0", "WORLD_SIZE": "4"})

    def test_bad_thread_count(self):
        self.refuse(SYNTHETIC, "GRADWIRE_THREADS='many'", env={"GRADWIRE_THREADS": "many"})


class Train(CommandTest):
    def train(self, *arguments):
        result = self.run_command("train", *synthetic(*arguments))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return result.stdout

    def records(self, name="run.jsonl"):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def test_log_holds_the_run(self):
        out = self.train("--ranks", 2, "--epochs", 2, "--log", "run.jsonl")
        self.assertTrue(out.startswith("Device: host"), out)
        records = self.records()
        kinds = [r["type"] for r in records]
        self.assertEqual(kinds, ["run"] + ["step"] * 8 + ["eval"] + ["step"] * 8 + ["eval", "summary"])
        steps = [r for r in records if r["type"] == "step"]
        self.assertEqual([s["step"] for s in steps], list(range(16)))
        self.assertEqual([s["epoch"] for s in steps], [0] * 8 + [1] * 8)
        for step in steps:
            self.assertGreater(step["step_ms"], 0)
            self.assertGreater(step["wire_bytes"], 0)
            self.assertEqual(step["wire_bytes"], step["dense_bytes"])
        self.assertEqual(records[-2]["images"], 32)
        self.assertEqual(records[-1]["test_accuracy"], records[-2]["test_accuracy"])
        self.assertEqual(sum(line.startswith("step ") for line in out.splitlines()), 16)

    def test_products_do_not_hang_on_somebody_elses_variables(self):
        def run(**variables):
            # Wide enough for OpenBLAS: the smallest products are not its.
            out = self.run_command("train", *synthetic("--width", 96, "--mlp", 192, "--steps", 3, "--log", "run.jsonl"),
                                   env=variables)
            self.assertEqual((out.returncode, out.stderr), (0, ""))
            head, *steps = (r for r in self.records() if r["type"] in ("run", "step"))
            self.assertIn("Products: " + head["products"], out.stdout)
            return head["products"], [r["loss"] for r in steps]

        plain = run()
        self.assertRegex(plain[0], r"^OpenBLAS [0-9.]+, \w+ kernels")
        self.assertEqual(run(OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="3"), plain)
        old = run(GRADWIRE_BLAS_KERNELS="Prescott")
        self.assertIn("Prescott kernels (GRADWIRE_BLAS_KERNELS)", old[0])
        if "Prescott" not in plain[0]:
            self.assertNotEqual(old[1], plain[1])  # so the losses above do tell kernels apart
        refused = self.run_command("train", *synthetic("--steps", 1), env={"GRADWIRE_BLAS_KERNELS": "Nonsense"})
        self.assert_refused(refused, "GRADWIRE_BLAS_KERNELS=Nonsense", "use one of")

    def test_same_seed_same_numbers(self):
        def losses(*arguments):
            self.train("--ranks", 2, "--steps", 5, "--log", "run.jsonl", "--compression", "bf16:round=stochastic", *arguments)
            return [(r.get("loss"), r.get("test_loss")) for r in self.records() if r["type"] in ("step", "eval")]

        first = losses()
        self.assertEqual(first, losses())
        self.assertNotEqual(first, losses("--seed", 1))

    def test_world_of_one_sends_nothing(self):
        self.train("--steps", 2, "--log", "run.jsonl")
        self.assertEqual({r["wire_bytes"] for r in self.records() if r["type"] == "step"}, {0})
        self.assertIsNone(self.records()[-1]["ratio"])

    def test_diverged_run_stays_valid_json(self):
        self.train("--steps", 6, "--optimizer", "sgd", "--lr", "1e6", "--warmup", 0, "--log", "run.jsonl")
        text = (self.folder / "run.jsonl").read_text()
        self.assertNotIn("nan", text.lower().replace('"model"', ""))
        self.assertEqual(self.records()[-1]["type"], "summary")

    def test_dry_run_writes_nothing_and_shows_what_was_resolved(self):
        out = self.train("--dry-run", "--log", "run.jsonl", "--ranks", 4, "--compression", "powersgd:rank=2")
        config, end = json.JSONDecoder().raw_decode(out[out.index("{"):])
        self.assertIn("Extra memory for powersgd:rank=2: ", out[out.index("{") + end:])
        self.assertEqual(config["steps"], 12)
        self.assertEqual(config["compression"], "powersgd:rank=2")
        self.assertEqual(self.files(), [])

    def test_progress_bar_on_a_terminal_only(self):
        leader, follower = pty.openpty()
        process = subprocess.Popen([GRADWIRE, "train", *SYNTHETIC, "--steps", "30"], stdout=follower, cwd=self.folder)
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # the terminal is gone when the process is
            pass
        os.close(leader)
        self.assertEqual(process.wait(timeout=60), 0)
        self.assertIn(b"\r\x1b[K", shown)
        self.assertIn(b"images/s", shown)
        self.assertNotIn("\r", self.train("--steps", 3))


class Checkpoints(CommandTest):
    RUN = ["train", "--ranks", "2", "--compression", "bf16", "--steps", "8", "--log", "run.jsonl"]

    def train(self, *extra):
        return self.run_command(*self.RUN, *synthetic(), *extra)

    def test_a_stopped_run_goes_on_with_its_log_and_refuses_damage(self):
        saving = ["--checkpoint", "saved", "--checkpoint-every", "3", "--resume", "saved"]
        first = self.train(*saving)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertIn("Nothing to resume in saved", first.stdout)
        records = [json.loads(line) for line in (self.folder / "run.jsonl").read_text().splitlines()]
        self.assertEqual([r["step"] for r in records if r["type"] == "checkpoint"], [3, 6, 8])
        whole = [(r["step"], r["loss"]) for r in records if r["type"] == "step"]

        shutil.rmtree(self.folder / "saved" / "step-000000008")
        (self.folder / "saved" / "step-000000007.tmp").mkdir()
        with (self.folder / "run.jsonl").open("a") as log:
            log.write('{"type": "step", "st')  # where a kill left it
        second = self.train(*saving)
        self.assertEqual(second.returncode, 0, second.stderr)
        self.assertIn("Ignoring saved/step-000000007.tmp: it was not finished", second.stdout)
        self.assertIn("Resuming from saved/step-000000006, after 6 of 8 steps", second.stdout)
        records = [json.loads(line) for line in (self.folder / "run.jsonl").read_text().splitlines()]
        self.assertEqual([(r["step"], r["loss"]) for r in records if r["type"] == "step"], whole)
        self.assertEqual([r["type"] for r in records].count("run"), 1)
        self.assertEqual([r["step"] for r in records if r["type"] == "resume"], [6])
        self.assertEqual(records[-1]["type"], "summary")

        changed = self.train("--dry-run", "--lr", "0.5", "--resume", "saved")
        self.assertEqual(changed.returncode, 0, changed.stderr)
        self.assertIn("Note: the checkpoint was made with lr 0.001, now 0.5", changed.stdout)

        state = self.folder / "saved" / "step-000000008" / "state-1-of-2.safetensors"
        good = state.read_bytes()
        state.write_bytes(good[:-100])
        self.assert_refused(self.train(*saving), "state-1-of-2.safetensors", "truncated")
        state.write_bytes(good[:-100] + bytes(100))
        self.assert_refused(self.train(*saving), "state-1-of-2.safetensors", "damaged", "checksum")

    def test_what_cannot_be_is_refused(self):
        self.assertEqual(self.train("--checkpoint", "saved").returncode, 0)
        files = self.files()
        for extra, parts in ((["--checkpoint", "saved"], ["saved", "already", "--resume"]),
                             (["--checkpoint", "saved", "--resume", "nowhere"], ["saved", "already"]),
                             (["--resume", "nowhere"], ["nowhere", "no such folder"]),
                             (["--resume", "."], ["no complete checkpoint"]),
                             (["--checkpoint", "run.jsonl"], ["run.jsonl", "not a folder"]),
                             (["--checkpoint-every", "3"], ["--checkpoint-every", "--checkpoint DIR"]),
                             (["--checkpoint", "new", "--checkpoint-every", "0"], ["--checkpoint-every 0"]),
                             (["--checkpoint", "new", "--checkpoint-keep", "0"], ["--checkpoint-keep 0"]),
                             (["--init", "run.jsonl"], ["run.jsonl", "safetensors"]),
                             (["--init", "nowhere"], ["nowhere", "no such file"]),
                             (["--init", "x", "--resume", "saved"], ["--init", "--resume"]),
                             (["--optimizer", "sgd", "--resume", "saved"], ["optimizer", "adamw", "sgd"])):
            with self.subTest(extra=extra):
                self.assert_refused(self.train(*extra), *parts)
                self.assertEqual(self.files(), files)
        deeper = self.run_command("train", *synthetic("--depth", "2"), "--init", "saved/step-000000008/model.safetensors")
        self.assert_refused(deeper, "missing: encoder.layers.encoder_layer_1", "more")


class Compare(CommandTest):
    def test_table_and_files(self):
        result = self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 3, "--compression", "fp32", "--compression",
                                  "bf16", "--compression", "powersgd:rank=1", "--json", "out.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.files(), ["out.0.jsonl", "out.1.jsonl", "out.2.jsonl", "out.json"])
        runs = json.loads((self.folder / "out.json").read_text())
        self.assertEqual([r["compression"] for r in runs], ["fp32", "bf16", "powersgd:rank=1"])
        for run in runs:
            self.assertEqual(set(run), {"compression", "test_accuracy", "final_loss", "step_ms", "images_per_s", "wire_bytes",
                                        "dense_bytes", "ratio", "exposed_comm_ms", "ranks", "device", "schedule", "bucket_mb"})
            self.assertEqual(run["dense_bytes"], runs[0]["wire_bytes"])
        self.assertAlmostEqual(runs[0]["ratio"], 1.0)
        self.assertGreater(runs[1]["ratio"], 1.9)
        table = result.stdout[result.stdout.index("compression  "):].splitlines()
        self.assertEqual([line.split()[0] for line in table[2:5]], ["fp32", "bf16", "powersgd:rank=1"])

    def test_all_start_from_the_same_weights(self):
        self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 1, "--compression", "fp32", "--compression", "bf16",
                         "--bucket-mb", 0.002, "--bucket-mb", 25, "--json", "out.json")
        logs = [[json.loads(line) for line in (self.folder / f"out.{i}.jsonl").read_text().splitlines()] for i in range(4)]
        self.assertEqual(len({log[1]["loss"] for log in logs}), 1)
        # Every compression with every bucket size.
        self.assertEqual([(log[0]["compression"], log[0]["bucket_mb"]) for log in logs],
                         [("fp32", 0.002), ("fp32", 25), ("bf16", 0.002), ("bf16", 25)])
        self.assertGreater(logs[0][0]["buckets"], logs[1][0]["buckets"])
        self.assertEqual([r["bucket_mb"] for r in json.loads((self.folder / "out.json").read_text())], [0.002, 25, 0.002, 25])


class Processes(CommandTest):
    """Ranks that are processes, started by hand; tests/integrations/launchers_test.py has real launchers."""

    def setUp(self):
        super().setUp()

    def start(self, world, *arguments, ranks=None, own=None, **env):
        """One process per rank, which meet through a file unless told otherwise; `own`: a rank's own arguments."""
        if "MASTER_ADDR" not in env and "--rendezvous" not in arguments:
            arguments += ("--rendezvous", f"file://{self.folder}/meeting")
        processes = []
        for rank in ranks or range(world):
            every = self.environment({"RANK": str(rank), "WORLD_SIZE": str(world), **env})
            words = [GRADWIRE, *map(str, arguments), *map(str, (own or {}).get(rank, ()))]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=every,
                                       cwd=self.folder)
            self.addCleanup(lambda p=process: (p.kill(), p.communicate()))
            processes.append(process)
        return processes

    def run_processes(self, world, *arguments, code=0, **options):
        processes = self.start(world, *arguments, **options)
        ends = [(*p.communicate(timeout=240), p.returncode) for p in processes]
        for rank, (out, error, ended) in enumerate(ends):
            self.assertEqual(ended, code, f"rank {rank}: {out[-300:]} {error[-600:]}")
        return ends

    def numbers(self, name):
        keys = ("type", "step", "loss", "lr", "test_loss", "test_accuracy", "wire_bytes", "final_loss")
        records = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return [[r.get(key) for key in keys] for r in records]

    def rows(self, name):
        """How many spans each rank's streams have in a trace, but for exchanges: into how many slices they are cut is the links' to say."""
        events = json.loads((self.folder / name).read_text())["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [(e["pid"], names[e["pid"], e["tid"]]) for e in events if e["ph"] == "X" and e["cat"] != "exchange"]
        return {row: spans.count(row) for row in spans}

    def test_same_bits_as_threads(self):
        for world, spec, data in ((2, "fp32:schedule=ring", ["--data", "synthetic:128", "--batch-size", 8, "--device", "host"]),
                                  (2, "bf16:round=stochastic,schedule=two_shot", SYNTHETIC),
                                  (3, "powersgd:rank=1,schedule=tree", SYNTHETIC)):
            flags = ["train", *data, "--steps", 5, "--compression", spec, "--trace"]
            threads = self.run_command(*flags, "threads.json", "--ranks", world, "--log", "threads.jsonl")
            self.assertEqual(threads.returncode, 0, threads.stderr)
            ends = self.run_processes(world, *flags, "processes.json", *(["--graph"] if world == 3 else []), "--log", "processes.jsonl")
            if world < 3:  # a graph has no marks for each exchange
                self.assertEqual(self.rows("threads.json"), self.rows("processes.json"), spec)
            self.assertEqual(self.numbers("threads.jsonl"), self.numbers("processes.jsonl"), spec)
            self.assertEqual([r[0] for r in self.numbers("processes.jsonl")], ["run"] + ["step"] * 5 + ["eval", "summary"])
            self.assertIn(f"Launcher: the environment (RANK=0 WORLD_SIZE={world}), meeting at file://", ends[0][0])
            for out, error, _ in ends[1:]:
                self.assertEqual((out, error), ("", ""), "only rank 0 speaks")

    def test_compare(self):
        self.run_processes(2, "compare", *SYNTHETIC, "--steps", 2, "--compression", "fp32", "--compression", "bf16",
                           "--json", "out.json", "--rendezvous", f"tcp://127.0.0.1:{free_port()}")
        self.assertEqual(self.files(), ["out.0.jsonl", "out.1.jsonl", "out.json"])
        self.assertEqual([r["ranks"] for r in json.loads((self.folder / "out.json").read_text())], [2, 2])

    def test_doctor(self):
        ends = self.run_processes(3, "doctor", "--model", "vit_tiny", "--batch-size", 8, "--timeout-s", 60, "--device", "host",
                                  "--json", "doctor.json")
        self.assertEqual(ends[1][:2], ("", ""), "only rank 0 speaks")
        for word in ("Links between 3 ranks, transport tcp", "rank 1", "Prediction: vit_tiny", "Recommendation: "):
            self.assertIn(word, ends[0][0])
        found = json.loads((self.folder / "doctor.json").read_text())
        self.assertEqual(found["ranks"]["world"], 3)
        self.assertGreater(found["ranks"]["pairs"][0]["gb_per_s"], 0)
        best = found["prediction"]["best"]
        self.assertEqual([p["compression"] for p in best[:2]], ["fp32", "bf16"])
        self.assertIn(found["prediction"]["recommended"], best)

    def test_agents_store_on_the_port(self):
        """torchrun's agent listens on MASTER_PORT itself."""
        with socket.socket() as agent:
            agent.bind(("127.0.0.1", 0))
            agent.listen()
            ends = self.run_processes(2, "train", *SYNTHETIC, "--steps", 1, MASTER_ADDR="127.0.0.1",
                                      MASTER_PORT=str(agent.getsockname()[1]), TORCHELASTIC_RUN_ID="none",
                                      TORCHELASTIC_USE_AGENT_STORE="True")
        self.assertIn("Launcher: torchrun (RANK=0 WORLD_SIZE=2)", ends[0][0])

    def test_different_flags_are_told_apart(self):
        processes = self.start(3, "train", *SYNTHETIC, own={2: ["--lr", "0.5"]})
        ends = [p.communicate(timeout=240)[1] for p in processes]
        self.assertEqual([p.returncode for p in processes], [2, 1, 1], ends)
        for error in ends:
            self.assertIn("rank 2 was started with other settings or data than rank 0: \"lr\": 0.5 there, \"lr\": 0.001 here", error)

    def test_a_killed_rank_ends_the_others(self):
        processes = self.start(3, "train", *SYNTHETIC, "--steps", 100000, "--log", "run.jsonl")
        while "step 3/" not in processes[0].stdout.readline():
            self.assertIsNone(processes[0].poll())
        processes[2].kill()
        for process in processes[:2]:
            error = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, 1)
            self.assertEqual(len(error.splitlines()), 1, error)
            self.assertIn("rank 2", error)
        for line in (self.folder / "run.jsonl").read_text().splitlines():
            json.loads(line)


class Doctor(CommandTest):
    def test_says_what_there_is(self):
        result = self.run_command("doctor")
        self.assertEqual(result.returncode, 0)
        for word in ("Host", "CUDA", "threads", "SIMD", "BLAS", "compiler", "fashion-mnist", "launcher", "Network", "Peaks"):
            self.assertIn(word, result.stdout)
        self.assertRegex(result.stdout, r"BLAS +OpenBLAS [0-9.]+, \w+ kernels")
        self.assert_refused(self.run_command("doctor", "--json", "/nowhere/x.json"), "/nowhere")
        self.assert_refused(self.run_command("doctor", "--model", "vit_z"), "vit_z")

    def test_warns_of_slow_products(self):
        fma_share = self.peaks()["fma_share"]
        if fma_share is None:  # no AVX2, or a sanitized build
            return
        slow = self.peaks(GRADWIRE_BLAS_KERNELS="Prescott", says="unset GRADWIRE_BLAS_KERNELS=Prescott")
        self.assertLess(slow["fma_share"], 0.6)
        self.assertGreater(fma_share, slow["fma_share"])
        self.assert_refused(self.run_command("doctor", env={"GRADWIRE_BLAS_KERNELS": "Nonsense"}),
                            "GRADWIRE_BLAS_KERNELS=Nonsense", "Haswell")

    def peaks(self, says="", **variables):
        result = self.run_command("doctor", "--device", "host", "--json", "doctor.json", env=variables)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(says, result.stdout)
        return json.loads((self.folder / "doctor.json").read_text())["peaks"]

    def test_help_and_version(self):
        for arguments in (["--help"], ["train", "--help"], ["compare", "--help"], ["--version"]):
            result = self.run_command(*arguments)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            self.assertIn("gradwire", result.stdout.lower())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: cli_test.py PATH_OF_GRADWIRE [unittest arguments]")
    GRADWIRE = os.path.abspath(sys.argv.pop(1))
    unittest.main()
