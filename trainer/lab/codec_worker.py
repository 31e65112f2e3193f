"""Runs the class Codec of a Python file for one bucket of one rank. gradwire starts this program and talks to
it over a socket: a frame is a letter, the number of its bytes, and the bytes.

Usage: codec_worker.py FILE.py DESCRIPTOR
"""
import ast
import json
import os
import pathlib
import signal
import socket
import struct
import sys
import traceback
import types

sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # ignored by Python itself
# Every rank has workers, so one thread per worker is enough.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

HEAD = struct.Struct("<cq")


class Abandoned(BaseException):
    """Raised in a codec's step that ends without a result, because a gradient was not finite."""


class Link:
    """The socket to gradwire."""

    def __init__(self, descriptor: int):
        self.socket = socket.socket(fileno=descriptor)

    def receive(self) -> tuple:
        """Returns a frame's letter and bytes. Ends the program if gradwire has ended."""
        kind, size = HEAD.unpack(self._exactly(HEAD.size))
        return kind, self._exactly(size)

    def send(self, kind: bytes, data) -> None:
        try:
            self.socket.sendall(HEAD.pack(kind, len(data)))
            self.socket.sendall(data)
        except OSError:
            sys.exit(0)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self.socket.recv_into(view[done:])
            if count == 0:
                sys.exit(0)
            done += count
        return data


class Bucket(types.SimpleNamespace):
    """Describes a bucket to its codec: rank, world, elements, seed (equal on all ranks), name, tensors."""

    def views(self, values) -> dict:
        """Returns the tensors of a bucket's values by name, as matrices that share the values' memory."""
        return {
            t.name: values[t.begin:t.begin + t.rows * t.cols].reshape(t.rows, t.cols) for t in self.tensors
        }


def argument(text: str):
    """Returns the number, True, False or text that a spec gives."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def load(path: str, about: dict):
    """Returns the file's Codec for the bucket."""
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    sys.dont_write_bytecode = True
    module = types.ModuleType(pathlib.Path(path).stem)
    module.__file__ = path
    exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module.__dict__)
    make = getattr(module, "Codec", None)
    if not callable(make):
        raise TypeError("the file defines no class Codec")
    tensors = [types.SimpleNamespace(**tensor) for tensor in about.pop("tensors")]
    arguments = {key: argument(value) for key, value in about.pop("arguments")}
    codec = make(Bucket(tensors=tensors, **about), **arguments)
    for method in () if hasattr(codec, "average") else ("encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise TypeError(f"Codec has no method {method}()")
    return codec


class Step:
    """One step: a codec's average of a gradient, and its exchanges."""

    def __init__(self, link: Link, elements: int):
        self.link = link
        self.elements = elements

    def gather(self, message) -> list:
        """Returns all ranks' messages, in the form of this rank's: bytes, an array, or a tuple of these. Arrays
        are flat, of this rank's type."""
        parts = message if isinstance(message, tuple) else (message,)
        kinds = []
        for part in parts:
            if not isinstance(part, (bytes, bytearray, numpy.ndarray)):
                raise TypeError(f"a message holds {type(part).__name__}; it may hold bytes, an array, or a "
                                "tuple of these")
            kinds.append(part.dtype if isinstance(part, numpy.ndarray) else None)
        data = [part.tobytes() if kind is not None else bytes(part) for part, kind in zip(parts, kinds)]
        # The lengths of all but the last part are sent, because they may differ between ranks.
        lengths = struct.pack(f"<{len(data) - 1}I", *(len(d) for d in data[:-1])) if data else b""
        self.link.send(b"g", lengths + b"".join(data))
        kind, reply = self.link.receive()
        if kind != b"m":
            raise Abandoned
        messages, at = [], 0
        while at < len(reply):
            (size,) = struct.unpack_from("<q", reply, at)
            messages.append(self._split(memoryview(reply)[at + 8:at + 8 + size], kinds))
            at += 8 + size
        return messages if isinstance(message, tuple) else [m[0] for m in messages]

    @staticmethod
    def _split(data: memoryview, kinds: list) -> tuple:
        count = max(len(kinds) - 1, 0)
        lengths = list(struct.unpack_from(f"<{count}I", data)) if count else []
        parts, at = [], 4 * count
        for kind, length in zip(kinds, [*lengths, len(data) - 4 * count - sum(lengths)]):
            part = data[at:at + length]
            parts.append(bytes(part) if kind is None else numpy.frombuffer(part, kind))
            at += length
        return tuple(parts)

    def run(self, codec, gradient):
        """Returns the average, after checking it."""
        if hasattr(codec, "average"):
            name, mean = "average", codec.average(gradient, self.gather)
        else:
            name, mean = "decode", codec.decode(self.gather(codec.encode(gradient)))
        mean = numpy.ascontiguousarray(mean, numpy.float32)
        if mean.size != self.elements:
            raise ValueError(f"{name}() returned {mean.size} values, and the bucket has {self.elements}")
        if not numpy.isfinite(mean).all():
            raise ValueError(f"{name}() returned NaN or Inf, and the gradients of all ranks are finite")
        return mean


def described(error: BaseException, path: str) -> str:
    """Returns an error in one line, with the last line of the user's file that was running."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}".replace("\n", " ")


def main() -> None:
    path, link = sys.argv[1], Link(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # gradwire ends this program
    sys.stdout = sys.stderr  # gradwire's stdout is not for a codec's print()
    codec, about = None, {}
    while True:
        kind, data = link.receive()
        try:
            if kind == b"i":
                about = json.loads(data)
                elements = about["elements"]
                codec = load(path, about)
                link.send(b"r", b"")
            else:
                gradient = numpy.frombuffer(data, numpy.float32)
                link.send(b"d", Step(link, elements).run(codec, gradient).tobytes())
        except Abandoned:
            pass
        except Exception as error:  # a user's code may raise anything
            link.send(b"e", described(error, path).encode())


try:
    import numpy
except ImportError as error:
    Link(int(sys.argv[2])).send(b"e", f"{sys.executable} has no numpy; name a Python with it in "
                                f"GRADWIRE_PYTHON ({error})".encode())
    sys.exit(1)

if __name__ == "__main__":
    main()
