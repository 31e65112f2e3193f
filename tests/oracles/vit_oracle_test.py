#!/usr/bin/python3
"""Compares Gradwire's ViT with torchvision's ViT: logits, loss and all gradients for the same weights and
images.

torchvision computes in double precision, so that all differences are Gradwire's rounding errors. A tensor's
error is the norm of the difference over the norm of torchvision's tensor; the limit is 1e-4, for logits and
each gradient.

usage: vit_oracle_test.py PATH_TO_vit_oracle [--device host|cuda:N]
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

try:
    import numpy as np
    import torch
    from torchvision.models.vision_transformer import VisionTransformer
except ImportError as error:
    sys.exit(
        f"FAILED: the oracle is missing ({error}). It needs Debian's python3-torch and python3-torchvision,"
        f" run by /usr/bin/python3; this is {sys.executable}.")

LIMIT = 1e-4

# 17 and 50 tokens are not multiples of 8. The head dimensions are 8, 4 and 64.
CASES = {
    "small, 17 tokens, 3 channels": dict(image=16, channels=3, patch=4, width=24, depth=2, heads=3, mlp=40,
                                         classes=7, batch=3),
    "small, 10 tokens, 1 channel": dict(image=15, channels=1, patch=5, width=20, depth=3, heads=5, mlp=36,
                                        classes=10, batch=5),
    "small, tanh GELU": dict(image=16, channels=3, patch=4, width=24, depth=2, heads=3, mlp=40, classes=7,
                             batch=3, gelu="tanh"),
    "vit_b_32": dict(image=224, channels=3, patch=32, width=768, depth=12, heads=12, mlp=3072, classes=1000,
                     batch=2),
}


def build(case: dict) -> torch.nn.Module:
    model = VisionTransformer(image_size=case["image"], patch_size=case["patch"], num_layers=case["depth"],
                              num_heads=case["heads"], hidden_dim=case["width"], mlp_dim=case["mlp"],
                              num_classes=case["classes"])
    if case["channels"] != 3:
        model.conv_proj = torch.nn.Conv2d(case["channels"], case["width"], case["patch"], case["patch"])
    for module in model.modules():
        if isinstance(module, torch.nn.GELU):
            module.approximate = "tanh" if case.get("gelu") == "tanh" else "none"
    # torchvision's initial head and biases are zero, which would hide all errors before them.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("heads.") or name == "class_token" or name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif ".ln" in name:
                parameter.normal_(1, 0.2)
            # Gradwire reads the same values, rounded to float32.
            parameter.copy_(parameter.float())
    return model.double()


def compare(tool: pathlib.Path, device: str, title: str, case: dict) -> bool:
    start = time.time()
    torch.manual_seed(1)
    model = build(case)
    shape = (case["batch"], case["channels"], case["image"], case["image"])
    images = torch.randn(shape, dtype=torch.float32)
    labels = torch.randint(case["classes"], (case["batch"],), dtype=torch.int64)
    logits = model(images.double())
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    parameters = dict(model.named_parameters())

    sizes = [case[k] for k in ("image", "channels", "patch", "width", "depth", "heads", "mlp", "classes")]
    names = subprocess.run([tool, "--names", *map(str, sizes)], check=True, capture_output=True,
                           text=True).stdout.split()
    if sorted(names) != sorted(parameters):
        print(f"{title}: parameter names differ: {sorted(set(names) ^ set(parameters))}")
        return False
    with tempfile.TemporaryDirectory() as folder:
        source, result = pathlib.Path(folder, "input"), pathlib.Path(folder, "output")
        with source.open("wb") as file:
            np.array(sizes + [case["batch"]], dtype="<i8").tofile(file)
            for name in names:
                parameters[name].detach().float().numpy().astype("<f4").tofile(file)
            images.numpy().astype("<f4").tofile(file)
            labels.numpy().astype("<i4").tofile(file)
        subprocess.run([tool, "--device", device, "--gelu",
                        case.get("gelu", "exact"), source, result], check=True)
        with result.open("rb") as file:
            our_loss = float(np.fromfile(file, "<f8", 1)[0])
            tensors = {"logits": (np.fromfile(file, "<f4", logits.numel()), logits.detach())}
            for name in names:
                tensors[name] = (np.fromfile(file, "<f4", parameters[name].numel()), parameters[name].grad)
            if file.read():
                print(f"{title}: output is too long")
                return False

    errors = {}
    for name, (ours, theirs) in tensors.items():
        want = theirs.numpy().ravel()
        norm = np.linalg.norm(want)
        if len(ours) != len(want) or norm == 0:
            print(f"{title}: {name}: {len(ours)} values for {len(want)}, norm {norm}")
            return False
        errors[name] = float(np.linalg.norm(ours - want) / norm)
    errors["loss"] = abs(our_loss - loss.item()) / abs(loss.item())
    bad = {name: error for name, error in errors.items() if not error <= LIMIT}  # also selects NaN
    for name, error in bad.items():
        print(f"{title}: {name}: relative error {error:.2e}, limit {LIMIT:.0e}")
    gradients = {name: error for name, error in errors.items() if name not in ("logits", "loss")}
    worst = max(gradients, key=gradients.get)
    print(f"{title}: {len(gradients)} gradients, worst {gradients[worst]:.1e} ({worst}); logits"
          f" {errors['logits']:.1e}, loss {errors['loss']:.1e}; {time.time() - start:.1f} s", flush=True)
    return not bad


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("tool", type=pathlib.Path)
    arguments.add_argument("--device", default="host")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    results = [compare(options.tool, options.device, title, case) for title, case in CASES.items()]
    print(f"{sum(results)} of {len(results)} agree with torchvision within {LIMIT:.0e} on {options.device}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
