#!/usr/bin/env python3
"""Tests `gradwire train --dump-gradients`, which saves one rank's gradients before they are sent."""
import array
import json
import os
import struct
import unittest

from command import CommandTest, main, synthetic


def read_safetensors(path):
    """Returns a map from name to (shape, floats), and the file's metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    about = header.pop("__metadata__")
    tensors = {}
    for name, tensor in header.items():
        begin, end = (8 + length + at for at in tensor["data_offsets"])
        tensors[name] = (tensor["shape"], array.array("f", data[begin:end]))
    return tensors, about


class Gradients(CommandTest):
    def train(self, *arguments):
        result = self.succeed("train", *synthetic(*arguments))
        return result.stdout

    def test_a_world_of_one_dumps_the_gradients_of_its_optimizer(self):
        out = self.train("--steps", 4, "--optimizer", "sgd", "--momentum", 0, "--lr", 0.5, "--warmup", 0,
                         "--checkpoint", "saved", "--checkpoint-every", 1, "--checkpoint-keep", 4, "--log",
                         "run.jsonl", "--dump-gradients", "2:deep/dumped", "--accumulate", 2)
        self.assertIn("Gradients of step 2: deep/dumped/gradients-step-2.safetensors", out)
        gradients, about = read_safetensors(self.folder / "deep/dumped/gradients-step-2.safetensors")
        before, after = (read_safetensors(self.folder / f"saved/step-00000000{steps}/model.safetensors")[0]
                         for steps in (2, 3))
        lr = [r["lr"] for r in self.records() if r["type"] == "step"][2]
        self.assertEqual(set(gradients), set(before))
        for name, (shape, values) in gradients.items():
            self.assertEqual(shape, before[name][0], name)
            self.assertTrue(any(values), f"{name} is all zero")
            for g, old, new in zip(values, before[name][1], after[name][1]):
                self.assertAlmostEqual(new, old - lr * g, delta=1e-6 * (abs(old) + abs(g)))
        self.assertEqual(json.loads(about["gradwire"])["gradients_of_step"], 2)
        self.assertEqual(self.records()[0]["dump_gradients"], "2:deep/dumped")

    def test_dumped_gradients_do_not_depend_on_the_compression(self):
        folders = {}
        for spec in ("fp32", "int8", "powersgd:rank=1"):
            folder = spec.partition(':')[0]
            self.train("--ranks", 2, "--steps", 1, "--bucket-mb", 0.002, "--compression", spec,
                       "--dump-gradients", f"0:{folder}")
            folders[folder] = read_safetensors(self.folder / folder / "gradients-step-0.safetensors")[0]
        self.assertEqual(len(folders), 3)
        for folder, tensors in folders.items():
            self.assertTrue(tensors == folders["fp32"], folder)
        # Rank 0 starts with the same images in a world of any size, so equal dumps show that the dump is not
        # a mean over ranks.
        self.train("--steps", 1, "--dump-gradients", "0:alone")
        alone = read_safetensors(self.folder / "alone/gradients-step-0.safetensors")[0]
        self.assertTrue(alone == folders["fp32"])

    def refuse(self, text, *parts, more=()):
        before = self.files()
        self.assert_refused(
            self.run_command("train", *synthetic("--steps", 3, "--dump-gradients", text, *more)),
            "--dump-gradients", *parts)
        self.assertEqual(self.files(), before)

    def test_bad_input(self):
        for text in ("", "3", "3:", ":dir", "x:dir", "-1:dir", "1.5:dir"):
            self.refuse(text, "STEP:DIR")
        self.refuse("3:dir", "steps 0 to 2")
        self.refuse("1:dir", "--graph", more=["--graph"])
        (self.folder / "file").write_text("kept")
        self.refuse("1:file", "file is not a folder")
        (self.folder / "dir").mkdir()
        (self.folder / "dir/gradients-step-1.safetensors").write_text("kept")
        self.refuse("1:dir", "dir/gradients-step-1.safetensors already exists")
        self.assert_refused(
            self.run_command("compare", *synthetic("--compression", "fp32", "--dump-gradients", "1:dir")),
            "--dump-gradients")

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_rejects_an_unwritable_folder(self):
        (self.folder / "dir").mkdir(mode=0o555)
        self.refuse("1:dir", "cannot be written to")


if __name__ == "__main__":
    main()
