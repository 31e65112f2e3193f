#!/usr/bin/python3
"""Loads torchvision's weights with `gradwire train --init`, and a checkpoint's into torchvision: file format,
names and shapes agree, and no bit changes.

usage: checkpoint_oracle_test.py PATH_TO_gradwire
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import torchvision
except ImportError as error:
    sys.exit(
        f"FAILED: the oracle is missing ({error}). It needs Debian's python3-torch and python3-torchvision,"
        f" run by /usr/bin/python3; this is {sys.executable}.")


def read(path: pathlib.Path) -> dict:
    """Returns the tensors of a safetensors file. Supports float32 only."""
    blob = path.read_bytes()
    length, = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8:8 + length]), memoryview(blob)[8 + length:]
    header.pop("__metadata__")
    tensors = {}
    for name, about in header.items():
        assert about["dtype"] == "F32"
        begin, end = about["data_offsets"]
        tensors[name] = torch.from_numpy(np.frombuffer(data[begin:end], "<f4").reshape(about["shape"]).copy())
    return tensors


def write(path: pathlib.Path, tensors: dict) -> None:
    header, blobs, end = {}, [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(raw)]}
        end += len(raw)
        blobs.append(raw)
    text = json.dumps(header).encode()
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *blobs]))


def main() -> None:
    gradwire = pathlib.Path(sys.argv[1]).resolve()
    torch.manual_seed(2)
    source = torchvision.models.vit_b_32()
    with torch.no_grad():  # the head is initially zero, which would hide a wrong layout
        source.heads.head.weight.normal_(0, 0.1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder / "torchvision.safetensors", source.state_dict())
        # With a learning rate of 0, a complete step changes no weight.
        subprocess.run([
            gradwire, "train", "--model", "vit_b_32", "--data", "synthetic:8", "--device", "host", "--steps",
            "1", "--batch-size", "1", "--eval-every", "0", "--optimizer", "sgd", "--momentum", "0", "--lr",
            "0", "--init", folder / "torchvision.safetensors", "--checkpoint", folder / "saved"
        ], check=True, stdout=subprocess.DEVNULL)
        weights = read(folder / "saved" / "step-000000001" / "model.safetensors")
    model = torchvision.models.vit_b_32()
    print(model.load_state_dict(weights))
    for (name, theirs), ours in zip(source.state_dict().items(), model.state_dict().values()):
        assert torch.equal(theirs, ours), f"{name} changed"
    print(f"{len(weights)} tensors, {sum(t.numel() for t in weights.values()):,} weights: into gradwire, out,"
          " and into torchvision, every bit as it was")


if __name__ == "__main__":
    main()
