#!/usr/bin/env python3
"""Writes images as arrays for `gradwire train --data arrays:DIR`.

    to_arrays.py IMAGES DIR --size 224           IMAGES/train/CLASS/* and IMAGES/test/CLASS/* (or val); or
                                                 IMAGES/CLASS/*, of which every tenth image is a test image
    to_arrays.py hf:ethz/food101 DIR --size 224  a data set of Hugging Face; needs the package `datasets`

Scales each image to cover a square and crops the center. Needs Pillow.
"""
import argparse
import pathlib
import sys

import numpy

try:
    from PIL import Image, ImageOps
except ImportError:
    sys.exit(f"to_arrays.py: Pillow is missing; install Debian's python3-pil, or Pillow for {sys.executable}")
TEST_SPLITS = ("val", "validation", "valid", "test")  # the labels of a public test split are often missing


def of_folder(folder):
    """Yields the train and the test split: the number of images, and pairs of (image, label)."""
    held_out = next((folder / name for name in TEST_SPLITS if (folder / name).is_dir()), None)
    train = folder / "train" if held_out else folder
    classes = sorted(path.name for path in train.iterdir() if path.is_dir())
    train, test = ([(path, label) for label, name in enumerate(classes)
                    for path in sorted((where / name).glob("*")) if path.is_file()] if where else []
                   for where in (train, held_out))
    if held_out is None:
        train, test = [pair for at, pair in enumerate(train) if at % 10 != 9], train[9::10]
    for pairs in (train, test):
        yield len(pairs), ((Image.open(path), label) for path, label in pairs)


def of_hugging_face(name):
    import datasets
    splits = datasets.load_dataset(name)
    test = next((split for split in TEST_SPLITS if split in splits), None)
    if test is None:
        sys.exit(f"to_arrays.py: hf:{name} has none of the splits {', '.join(TEST_SPLITS)}")
    for split in ("train", test):
        kinds = {type(feature).__name__: name for name, feature in splits[split].features.items()}
        image, label = kinds["Image"], kinds["ClassLabel"]
        yield len(splits[split]), ((row[image], row[label]) for row in splits[split])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("images", help="a folder, or hf:NAME")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", type=int, default=224, help="side in pixels (default: 224)")
    parser.add_argument("--gray", action="store_true", help="one channel instead of three")
    options = parser.parse_args()
    hub = options.images.startswith("hf:")
    splits = of_hugging_face(options.images[3:]) if hub else of_folder(pathlib.Path(options.images))
    options.folder.mkdir(parents=True, exist_ok=True)
    for split, (count, pairs) in zip(("train", "test"), splits):
        if count == 0:
            sys.exit(f"to_arrays.py: {options.images} has no {split} images")
        labels = numpy.zeros(count, numpy.int64)
        shape = (count, 1 if options.gray else 3, options.size, options.size)
        images = numpy.lib.format.open_memmap(options.folder / f"{split}_images.npy", "w+", "u1", shape)
        for at, (image, label) in enumerate(pairs):
            pixels = ImageOps.fit(image.convert("L" if options.gray else "RGB"), shape[2:])
            images[at], labels[at] = numpy.atleast_3d(pixels).transpose(2, 0, 1), label
        numpy.save(options.folder / f"{split}_labels.npy", labels)
        print(f"{split}: {count} images of {len(set(labels))} classes")


if __name__ == "__main__":
    main()
