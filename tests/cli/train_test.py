#!/usr/bin/env python3
"""Tests the console output and the log of `gradwire train`."""
import json
import os
import pathlib
import pty
import re
import subprocess
import termios

from command import CommandTest, SYNTHETIC, main, synthetic

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Train(CommandTest):
    def train(self, *arguments):
        result = self.succeed("train", *synthetic(*arguments))
        return result.stdout

    def test_log_contains_the_run(self):
        out = self.train("--ranks", 2, "--epochs", 2, "--log", "run.jsonl")
        self.assertTrue(out.startswith("Device: host"), out)
        records = self.records()
        records = [r for r in records if r["type"] != "waits"]  # their number depends on timing
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

    def test_without_a_flag_lines_are_seconds_apart(self):
        flags = synthetic("--steps", 40, "--ranks", 2)
        at = flags.index("--log-every")
        flags[at:at + 2] = []
        out = self.succeed("train", *flags).stdout
        lines = [line for line in out.splitlines() if line.startswith("step ")]
        self.assertEqual([line.split()[1] for line in (lines[0], lines[-1])], ["1/40", "40/40"])
        self.assertLess(len(lines), 20)
        summary = out.partition(" steps in ")[2].splitlines()[1:]
        self.assertEqual([line.split("  ")[1] for line in summary], [
            "accuracy", "step", "of a step", "in parallel", "sent", "waiting", "memory"])
        self.assertLessEqual(max(map(len, summary)), 150)
        self.assertNotIn("1.00x", "".join(summary))  # FP32 sends as much as FP32

    def test_formats_page_lists_every_field_of_the_log(self):
        self.train("--ranks", 2, "--optimizer", "sgd", "--gelu", "tanh", "--link", "1Gbit", "--checkpoint",
                   "saved", "--compression", "auto:allow=bf16+int8", "--log", "run.jsonl")
        page = (ROOT / "docs/formats.md").read_text()
        log = page.partition("\n## Run log: JSON lines\n")[2].partition("\n## ")[0]
        sections = {part.partition("\n")[0]: part for part in log.split("\n### ")}
        found = {}
        for record in self.records():
            found.setdefault(record["type"], set()).update(record, record.get("model", ()))
        self.assertEqual(found.keys(), {"run", "choice", "step", "waits", "checkpoint", "eval", "summary"})
        for kind, fields in found.items():
            titles = (f"`{kind}`", "Other")
            text = "".join(part for title, part in sections.items() if title.startswith(titles))
            text += sections["`step`: one per optimizer step"] * (kind == "summary")
            for field in fields - {"type"}:
                self.assertTrue(re.search(f"`{field}[`\\[]", text), f"docs/formats.md, 'Run log: JSON "
                                f"lines', lacks `{field}`: add it to the table of `{kind}`")

    def test_products_ignore_openblas_variables(self):
        def run(**variables):
            # The model is wide enough for OpenBLAS, which is not used for the smallest products.
            (self.folder / "run.jsonl").unlink(missing_ok=True)
            out = self.succeed(
            "train", *synthetic("--width", 96, "--mlp", 192, "--steps", 3, "--log", "run.jsonl"),
            env=variables)
            head, *steps = (r for r in self.records() if r["type"] in ("run", "step"))
            self.assertIn("Products: " + head["products"], out.stdout)
            return head["products"], [r["loss"] for r in steps]

        plain = run()
        self.assertRegex(plain[0], r"^OpenBLAS [0-9.]+, \w+ kernels")
        self.assertEqual(run(OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="3"), plain)
        old = run(GRADWIRE_BLAS_KERNELS="Prescott")
        self.assertIn("Prescott kernels (GRADWIRE_BLAS_KERNELS)", old[0])
        if "Prescott" not in plain[0]:
            self.assertNotEqual(old[1], plain[1])  # the losses compared above depend on the kernels
        refused = self.run_command("train", *synthetic("--steps", 1),
                                   env={"GRADWIRE_BLAS_KERNELS": "Nonsense"})
        self.assert_refused(refused, "GRADWIRE_BLAS_KERNELS=Nonsense", "use one of")

    def test_same_seed_same_numbers(self):
        def losses(*arguments):
            (self.folder / "run.jsonl").unlink(missing_ok=True)
            self.train("--ranks", 2, "--steps", 5, "--log", "run.jsonl", "--compression",
                       "bf16:round=stochastic", *arguments)
            return [(r.get("loss"), r.get("test_loss")) for r in self.records()
                    if r["type"] in ("step", "eval")]

        first = losses()
        self.assertEqual(first, losses())
        self.assertNotEqual(first, losses("--seed", 1))

    def test_like_repeats_a_run_with_the_flags_that_differ(self):
        numbers = lambda log: [(r.get("loss"), r.get("test_loss")) for r in self.records(log)
                               if r["type"] in ("step", "eval")]
        settings = lambda log: {k: v for k, v in self.records(log)[0].items()
                                if k not in ("peak_tflops", "copy_gb_per_s", "fma_share")}
        sgd = ("--optimizer", "sgd", "--momentum", 0.8, "--lr", 0.03, "--shard", "optimizer")
        for name, flags in (("int8", ("--compression", "int8:block=32", "--accumulate", 2, *sgd)),
                            ("dion", ("--optimizer", "dion:rank=2,mu=0.9,lr=0.02", "--compression", "int4")),
                            ("muon", ("--optimizer", "muon:mu=0.9", "--precision", "bf16", "--graph")),
                            ("adamw", ("--compression", "powersgd:rank=1", "--momentum", 0.85, "--link",
                                       "1Gbit", "--augment", "flip", "--eval-every", 0.5))):
            with self.subTest(name):
                whole, again, other = (f"{name}-{part}.jsonl" for part in ("whole", "again", "other"))
                self.train("--ranks", 2, "--seed", 3, "--trace", "trace.json", "--log", whole, *flags)
                (self.folder / "trace.json").unlink()
                out = self.succeed("train", "--like", whole, "--log", again).stdout
                self.assertIn(f"Settings that were not given are those of {whole}", out)
                self.assertEqual(numbers(again), numbers(whole))
                self.assertEqual(settings(again), {**settings(whole), "trace": None, "trace_steps": None})
                self.assertIn("--seed=3", settings(again)["flags"])
                self.succeed("train", "--like", whole, "--log", other, "--seed", 4, "--epochs", 0.5)
                self.assertNotEqual(numbers(other)[1], numbers(whole)[1])
                changed = ("seed", "steps", "epochs", "warmup_steps", "flags")
                self.assertEqual({k: v for k, v in settings(other).items() if k not in changed},
                                 {k: v for k, v in settings(again).items() if k not in changed})
        self.assertFalse((self.folder / "trace.json").exists())
        for text, part in (("", "not the log of a run"), ('{"type": "run"}', "lacks the flags"),
                           ('{"type": "run", "ranks": 2, "flags": ["--nil=1"]}', "--nil"),
                           ('{"type": "run", "ranks": 2, "flags": [7]}', "damaged")):
            (self.folder / "bad").write_text(text)
            self.assert_refused(self.run_command("train", "--like", "bad"), "--like bad", part)

    def test_diverged_runs_write_valid_json(self):
        result = self.run_command("train", *synthetic("--steps", 6, "--optimizer", "sgd", "--lr", "1e6",
                                                      "--warmup", 0, "--log", "run.jsonl"))
        self.assertEqual((result.returncode, result.stderr.count("\n")), (3, 1))
        text = (self.folder / "run.jsonl").read_text()
        self.assertNotIn("nan", text.lower().replace('"model"', ""))
        self.assertEqual(self.records()[-1]["type"], "summary")

    def test_dry_run_writes_nothing_and_prints_the_resolved_settings(self):
        out = self.train("--dry-run", "--log", "run.jsonl", "--ranks", 4, "--compression", "powersgd:rank=2")
        config, end = json.JSONDecoder().raw_decode(out[out.index("{"):])
        self.assertIn("Extra memory for powersgd:rank=2: ", out[out.index("{") + end:])
        self.assertEqual(config["steps"], 12)
        self.assertEqual(config["compression"], "powersgd:rank=2")
        self.assertEqual(self.files(), [])

    def test_rejects_a_log_and_a_trace_in_one_file(self):
        result = self.run_command("train", *synthetic("--trace", "x.json", "--log", "./x.json"))
        self.assert_refused(result, "--log ./x.json", "--trace x.json", "the same file")
        self.assertEqual(self.files(), [])

    def test_a_full_disk_at_standard_output_is_a_failure(self):
        for arguments in (["train", *synthetic("--steps", 3)], ["doctor"], ["--help"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([self.program, *map(str, arguments)], stdout=full,
                                      stderr=subprocess.PIPE, text=True, env=self.environment(),
                                      cwd=self.folder, timeout=240)
            self.assertEqual(done.returncode, 1, arguments)
            self.assertIn("gradwire: standard output could not be written", done.stderr)

    def test_metrics_have_the_path_of_their_run(self):
        self.train("--steps", 3, "--ranks", 2, "--log", 'a "b.jsonl')
        text = self.run_command("top", "--prometheus", 'a "b.jsonl').stdout
        run = f'{{run={json.dumps(str(self.folder.resolve() / "a"))[:-1]} \\"b.jsonl"'
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        self.assertIn(f'gradwire_steps_total{run}}} 3', samples)
        self.assertIn(f'gradwire_waited_seconds_total{run},rank="0",peer="1"}}', text)
        self.assertEqual([line for line in samples if run not in line], [])

    def test_a_carriage_return_in_a_variable_is_refused_by_name(self):
        for name in ("GRADWIRE_THREADS", "MASTER_ADDR", "MASTER_PORT"):
            ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", name: "1\r"}
            self.assert_refused(self.run_command("train", *synthetic(), env=ranks), name, "carriage return")

    def test_train_without_flags_shows_examples_that_work(self):
        result = self.run_command("train")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("gradwire train --help", result.stderr.splitlines()[0])
        examples = re.findall(r"^  gradwire (train .*?)(?: +#.*)?$", result.stderr, re.M)
        self.assertEqual(len(examples), 3)
        for example in examples:
            self.assertEqual(self.run_command(*example.split(), "--dry-run").returncode, 0, example)
        self.assertEqual(self.files(), [])

    def test_progress_bar_on_a_terminal_only(self):
        leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 40))
        process = subprocess.Popen([self.program, "train", *SYNTHETIC, "--steps", "30"], stdout=follower,
                                   cwd=self.folder)
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # the terminal is closed with the process
            pass
        os.close(leader)
        self.assertEqual(process.wait(timeout=60), 0)
        bars = [part for line in shown.split(b"\r\n") for part in line.split(b"\r")[1:-1]]
        self.assertIn(b"%  step ", b"".join(bars))
        self.assertEqual(max(map(len, bars)), 39)
        self.assertNotIn(b"\x1b", shown)  # dumb terminals have no escape sequences
        self.assertNotIn("\r", self.train("--steps", 3))


if __name__ == "__main__":
    main()
