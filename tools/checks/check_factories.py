#!/usr/bin/env python3
"""Fails where the Python package creates a tensor without naming its type and, with PyTorch, its device.

    check_factories.py ROOT

A program's torch.set_default_dtype(), torch.set_default_device() and jax_enable_x64 must not change what the
package computes. Functions that take another tensor's type (zeros_like, jnp.asarray) need no arguments.
"""
import ast
import pathlib
import sys

import gate

# The functions of each module, with the position of the argument dtype. None: dtype is a keyword only.
FACTORIES = {
    "torch": {name: None for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "linspace", "eye",
                                      "rand", "randn", "randint", "randperm", "as_tensor", "frombuffer",
                                      "scalar_tensor", "logspace", "empty_strided")},
    "jnp": {"zeros": 1, "ones": 1, "empty": 1, "full": 2, "array": 1, "arange": 3, "linspace": 5, "eye": 3},
}
WITHOUT_DEVICE = ("frombuffer",)  # always on the host


def missing(call: ast.Call) -> list[str]:
    """Returns the arguments that a call of a factory does not name."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return []
    module, name = function.value.id, function.attr
    if name not in FACTORIES.get(module, {}):
        return []
    given = {keyword.arg for keyword in call.keywords}
    position = FACTORIES[module][name]
    if position is not None and len(call.args) > position:
        given.add("dtype")
    needed = ["dtype"] if module == "jnp" or name in WITHOUT_DEVICE else ["dtype", "device"]
    return [argument for argument in needed if argument not in given]


def main() -> int:
    wrong, calls = [], 0
    root = pathlib.Path(sys.argv[1])
    for path in sorted(root.glob("integrations/python/gradwire/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                calls += 1
                wrong += [f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}: name {argument}="
                          for argument in missing(node)]
    return gate.end(wrong, f"{calls} calls: every factory names its type and device")


if __name__ == "__main__":
    sys.exit(main())
