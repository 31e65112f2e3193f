#!/usr/bin/env python3
"""Trains on arrays of images and labels: .npy and safetensors files, damaged files, and to_arrays.py."""
import importlib.util
import json
import pathlib
import struct
import sys
import unittest

import numpy

from command import CommandTest, SMALL, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = {"uint8": "U8", "int64": "I64"}
SPLITS = {"train": 64, "test": 16}


def arrays(count, channels=3):
    """Returns images of 8 x 8 pixels and labels of 4 classes."""
    images = numpy.random.default_rng(count).integers(0, 256, (count, channels, 8, 8), "u1")
    return {"images": images, "labels": (numpy.arange(count) % 4).astype("i8")}


def write_npy(folder, channels=3, change=lambda array: array):
    folder.mkdir()
    for split, count in SPLITS.items():
        for what, array in arrays(count, channels).items():
            numpy.save(folder / f"{split}_{what}.npy", change(array))


def write_safetensors(folder):
    folder.mkdir()
    for split, count in SPLITS.items():
        header, data = {}, b""
        for what, array in arrays(count).items():
            header[what] = {"dtype": TYPES[str(array.dtype)], "shape": array.shape,
                            "data_offsets": [len(data), len(data) + array.nbytes]}
            data += array.tobytes()
        text = json.dumps(header).encode()
        (folder / f"{split}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Arrays(CommandTest):
    FLAGS = ["train", "--image-size", 8, "--patch", 4, "--batch-size", 8, "--ranks", 2, "--steps", 4, *SMALL]

    def train(self, name, *more):
        log = f"{name}-{len(self.files())}.jsonl"
        out = self.succeed(*self.FLAGS, "--data", f"arrays:{name}", "--log", log, *more).stdout
        return out, [(r.get("loss"), r.get("test_loss")) for r in self.records(log)
                     if r["type"] in ("step", "eval")]

    def test_every_kind_of_file_gives_the_same_losses(self):
        write_npy(self.folder / "bytes")
        write_npy(self.folder / "small labels", change=lambda a: a.astype("u1"))
        write_safetensors(self.folder / "tensors")
        out, losses = self.train("bytes")
        self.assertIn("Data: arrays:bytes, 64 training and 16 test images of 3x8x8", out)
        self.assertEqual(len(losses), 5)
        for name in ("small labels", "tensors"):
            self.assertEqual(self.train(name)[1], losses)
        write_npy(self.folder / "gray", channels=1)
        write_npy(self.folder / "no channels", 1, lambda a: a[:, 0] if a.ndim > 1 else a)
        self.assertEqual(self.train("no channels")[1], self.train("gray")[1])

    def test_each_damage_is_one_line(self):
        good = {f"{split}_{what}": array for split, count in SPLITS.items()
                for what, array in arrays(count).items()}
        images, labels, test = good["train_images"], good["train_labels"], good["test_images"]
        cases = [("train_images", images.transpose(0, 2, 3, 1).repeat(2, 2), "channels last"),
                 ("train_images", images[:, 0, 0], "expected N x C x H x W"),
                 ("train_images", images.astype("f8"), "<f8; expected uint8"),
                 ("train_images", images.astype("i8"), "<i8; expected uint8"),
                 ("train_images", numpy.asfortranarray(images), "Fortran order"),
                 ("train_images", images[:0], "no values"),
                 ("train_images", images[:, :, :4], "training images are 3x4x8, test images 3x8x8"),
                 ("test_images", test[:, :1], "training images are 3x8x8, test images 1x8x8"),
                 ("train_labels", labels[:-1], "one for each of the 64 images"),
                 ("train_labels", labels - 1, "label 0 is -1, but the classes are 0 to"),
                 ("test_labels", good["test_labels"] + 1, "label 3 is 4, but the classes are 0 to 3"),
                 ("train_labels", labels.astype(">i8"), ">i8; expected uint8 or int64"),
                 ("train_labels", labels[:, None], "labels of shape 64 x 1")]
        whole = (lambda data: data)
        cases = [(name, array, whole, part) for name, array, part in cases]
        cases += [("train_images", images, lambda data: data[:-1], "truncated: 12287 bytes of values"),
                  ("train_images", images, lambda data: data[:20], "truncated: 20 bytes"),
                  ("train_images", images, lambda data: data + b"x", "too long"),
                  ("train_images", images, lambda data: b"", "not a .npy file"),
                  ("train_images", images, lambda data: b"PK\3\4" + data, "a zip archive"),
                  ("train_images", images, lambda data: data.replace(b"(64,", b"(-4,"), "its header"),
                  ("train_images", images, lambda data: data[:6] + b"\2" + data[7:], "version 2.0"),
                  ("train_images", images, lambda data: data[:8] + b"\xff" + data[9:], "its header"),
                  ("train_images", images, None, "no such file; arrays:DIR must have train_images.npy")]
        for at, (name, array, damage, part) in enumerate(cases):
            with self.subTest(part):
                write_npy(self.folder / str(at))
                file = self.folder / str(at) / f"{name}.npy"
                numpy.save(file, array)
                file.unlink() if damage is None else file.write_bytes(damage(file.read_bytes()))
                self.assert_refused(self.run_command(*self.FLAGS, "--data", f"arrays:{at}"), str(at), part)
        (self.folder / "0/train.safetensors").write_text("")
        self.assert_refused(self.run_command(*self.FLAGS, "--data", "arrays:0"), "exists also; remove one")

    @unittest.skipUnless(importlib.util.find_spec("PIL"), "Pillow is not installed")
    def test_to_arrays_reads_folders_of_images(self):
        from PIL import Image
        for at in range(40):
            folder = self.folder / "images" / ("dark", "light")[at % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 10), (200 * (at % 2),) * 3).save(folder / f"{at}.png")
        program = ROOT / "bench/harness/to_arrays.py"
        done = self.run_words(sys.executable, program, "images", "made", "--size", 8)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("train: 36 images of 2 classes", done.stdout)
        images, labels = (numpy.load(self.folder / f"made/test_{what}.npy") for what in ("images", "labels"))
        self.assertEqual((images.shape, [*labels]), ((4, 3, 8, 8), [0, 0, 1, 1]))
        self.assertEqual([*images[:, 0, 0, 0]], [0, 0, 200, 200])
        self.train("made")


if __name__ == "__main__":
    main()
