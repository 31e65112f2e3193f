#!/usr/bin/env python3
"""Tests codecs written in Python: `--compression FILE.py[:KEY=VALUE...]` of train and compare."""
import json
import pathlib
import shutil

from command import CommandTest, SYNTHETIC, main

EF21 = pathlib.Path(__file__).resolve().parents[2] / "trainer/lab/ef21.py"

# The coordinates of Gradwire's random-k (docs/numerics.md, kernels/math/strata.h), drawn with NumPy.
RANDK = '''
import numpy

def philox(stream, counters):
    """Philox-4x32-10 with seed 0: the first two words of each counter."""
    c = [counters & 0xffffffff, counters >> 32, numpy.full_like(counters, stream), numpy.zeros_like(counters)]
    k = [0, 0]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xffffffff, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xffffffff]
        k = [k[0] + 0x9E3779B9 & 0xffffffff, k[1] + 0xBB67AE85 & 0xffffffff]
    return c[0], c[1]

def draw(tensors, step, ratio):
    """Returns the positions in the bucket that all ranks choose in this step."""
    chosen = []
    for t in tensors:
        count = t.rows * t.cols
        k = max(1, int(numpy.floor(ratio * count + 0.5)))
        strata = numpy.arange(k)
        high, low = philox(step, numpy.array([(t.index << 40) + (1 << 40) - 1], numpy.uint64))
        rotation = (int(high[0]) << 32 | int(low[0])) % count
        sizes = count // k + (strata < count % k)
        words = philox(step, strata.astype(numpy.uint64) + numpy.uint64(t.index << 40))[0]
        picks = (words * sizes.astype(numpy.uint64) >> numpy.uint64(32)).astype(int)
        begins = strata * (count // k) + numpy.minimum(strata, count % k)
        chosen.append(t.begin + (begins + picks + rotation) % count)
    return numpy.concatenate(chosen)
'''


class Lab(CommandTest):
    def write(self, name, text):
        (self.folder / name).write_text(text)

    def losses(self, *specs, ranks=2, steps=6, extra=()):
        """Returns the losses of each spec's run, and the comparison's table."""
        words = [word for spec in specs for word in ("--compression", spec)]
        result = self.run_command("compare", *SYNTHETIC, "--ranks", ranks, "--steps", steps, "--json",
                                  "out.json", *words, *extra)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        logs = [self.records(f"out.{i}.jsonl") for i in range(len(specs))]
        return [[r["loss"] for r in log if r["type"] == "step"] for log in logs], json.loads(
            (self.folder / "out.json").read_text())

    def assert_near(self, got, want, limit):
        self.assertEqual(len(got), len(want))
        for a, b in zip(got, want):
            self.assertLess(abs(a - b), limit * abs(b))

    def test_ef21_in_python_equals_the_built_in(self):
        shutil.copy(EF21, self.folder)
        self.write("mine.py", RANDK + """
import ef21

class Codec(ef21.Codec):
    def __init__(self, bucket, ratio):
        super().__init__(bucket)
        self.bucket, self.ratio, self.step = bucket, ratio, 0

    def select(self, values):
        self.step += 1
        return draw(self.bucket.tensors, self.step - 1, self.ratio)
""")
        # Other ranks get the same messages in the same order, so the number of ranks changes nothing else.
        for ranks in (2, 3):
            (ours, theirs, plain), _ = self.losses("randk:ratio=0.1,ef=ef21", "mine.py:ratio=0.1,dense=off",
                                                   "fp32", ranks=ranks, steps=20, extra=("--seed", ranks))
            self.assert_near(theirs, ours, 1e-6)
            self.assertGreater(max(abs(a - b) for a, b in zip(ours, plain)), 1e-3)  # EF21 matters here

    def test_a_codec_that_loses_nothing_equals_fp32(self):
        self.write("plain.py", """
class Codec:
    def __init__(self, bucket):
        pass
    def encode(self, gradient):
        return gradient
    def decode(self, messages):
        return sum(messages) / len(messages)
""")
        # Several buckets share the ranks' links, and dense tensors travel in between.
        for buckets in (25, 0.002):
            (plain, python), table = self.losses("fp32:schedule=two_shot", "plain.py:dense=off", ranks=3,
                                                 extra=("--bucket-mb", buckets))
            self.assert_near(python, plain, 1e-6)
            # All ranks get each message: 2 elements per element and rank, and a two-shot sends 4/3.
            self.assertAlmostEqual(table[1]["wire_bytes"] / table[0]["wire_bytes"], 1.5, delta=0.05)
            self.assertEqual(table[1]["compression"], "plain.py:dense=off")

    def test_messages_keep_their_form_and_average_may_exchange_more_than_once(self):
        self.write("parts.py", """
import numpy
class Codec:
    def __init__(self, bucket, label, least=2):
        assert (label, least) == ("abc", 3), (label, least)
        self.bucket = bucket
    def average(self, gradient, gather):
        rank = self.bucket.rank
        counts = gather(numpy.array([gradient.size // (rank + 1)], numpy.int64))
        messages = gather((gradient[:counts[rank][0]], bytes([rank] * rank), gradient[counts[rank][0]:]))
        for r, (head, label, tail) in enumerate(messages):
            assert head.size == counts[r][0] and label == bytes([r] * r) and head.dtype == numpy.float32
        whole = [numpy.concatenate([head, tail]) for head, _, tail in messages]
        mean = sum(whole) / numpy.float32(len(whole))
        for name, view in self.bucket.views(mean).items():
            assert view.ndim == 2 and numpy.shares_memory(view, mean), name
        return mean
""")
        (plain, python), _ = self.losses("fp32:schedule=two_shot", "parts.py:label=abc,least=3,dense=off",
                                         ranks=3)
        self.assert_near(python, plain, 1e-6)

    def test_the_example_of_the_page_trains(self):
        page = (EF21.parents[2] / "docs/for-researchers.md").read_text()
        example = next(part for part in page.split("```")[1::2] if "# mine.py" in part)
        self.write("mine.py", example[len("python"):])
        (first, second), _ = self.losses("mine.py:dense=off", "mine.py:decay=0.9,dense=off", steps=30)
        self.assertNotEqual(first, second)
        for losses in (first, second):
            self.assertLess(losses[-1], losses[0])

    def test_bits_by_block_keep_the_bytes_of_equal_bits(self):
        codec = f"{EF21.with_name('block_bits.py')}:bits=3,dense=off"
        (varying, equal), table = self.losses(codec, codec + ",fixed=True")
        self.assertEqual(table[0]["wire_bytes"], table[1]["wire_bytes"])
        self.assertEqual(varying[:2], equal[:2])  # the first step's bits are equal
        self.assertNotEqual(varying[2:], equal[2:])

    def test_a_changed_file_is_a_new_run(self):
        text = ("class Codec:\n def __init__(self, bucket): pass\n def encode(self, g): return g\n"
                " def decode(self, m): return sum(m) * SCALE / len(m)\n")
        self.write("c.py", text.replace("SCALE", "1"))
        (first,), _ = self.losses("c.py:dense=off")
        self.write("c.py", text.replace("SCALE", "0.5"))
        (second,), _ = self.losses("c.py:dense=off")
        self.assertNotEqual(first, second)  # the first run's log was not reused

    def run_codec(self, body, *extra, steps=3):
        """Trains with a codec whose methods are `body`, from line 6 on."""
        self.write("bad.py", "import os, time, numpy\nclass Codec:\n"
                   " def __init__(self, bucket): self.rank, self.n = bucket.rank, bucket.elements\n"
                   " def encode(self, g): return g\n"
                   " def decode(self, m): return sum(m) / len(m)\n" + body)
        return self.train("bad.py", "--steps", steps, *extra)

    def train(self, spec, *flags):
        spec += ",dense=off" if ":" in spec else ":dense=off"  # the model's matrices are small
        return self.run_command("train", *SYNTHETIC, "--ranks", 2, "--compression", spec, *flags)

    def test_errors_of_a_codec_are_one_line_on_any_rank(self):
        only_rank_1 = " def {}(self, x):\n  if self.rank == 1: {}\n  return {}\n"
        mean = "sum(x) / len(x)"
        for body, parts in (
            (" def encode(self, g): return 1 / 0\n", ["rank 0", "step 0", "line 6", "ZeroDivisionError"]),
            (only_rank_1.format("encode", "return 'text'", "x"), ["rank 1", "holds str", "an array"]),
            (only_rank_1.format("decode", "raise KeyError('q')", mean), ["rank 1", "line 7", "KeyError"]),
            (" def decode(self, m): return m[0][:-1]\n", ["rank 0", "decode() returned", "values"]),
            (" def decode(self, m): return m[0] * numpy.nan\n", ["rank 0", "decode() returned NaN or Inf"]),
            (only_rank_1.format("decode", "return x[1]", "x[0]"), ["rank 1", "differs from rank 0's"]),
            (only_rank_1.format("encode", "os._exit(3)", "x"), ["rank 1", "exit status 3"]),
            (only_rank_1.format("encode", "os.kill(os.getpid(), 11)", "x"), ["rank 1", "signal 11"]),
            (" def average(self, g, gather):\n  return gather(g)[0] if self.rank else g\n",
             ["rank 1", "different numbers of messages"]),
        ):
            self.assert_refused(self.run_codec(body), "--compression bad.py", *parts)

    def test_an_error_while_a_codec_is_made_names_the_rank_and_the_bucket(self):
        result = self.run_codec(" def __init__(self, bucket):\n  if bucket.rank == 1: raise ValueError(41)\n")
        self.assert_refused(result, "--compression bad.py", "rank 1, bucket 1 of 1: ", "ValueError: 41")

    def test_a_codec_that_hangs_ends_in_time(self):
        result = self.run_codec(" def encode(self, g):\n  while self.rank == 1: time.sleep(1)\n  return g\n",
                                "--timeout-s", 20)
        self.assert_refused(result, "--compression bad.py", "rank 1", "no answer within 10 s")

    def test_errors_between_processes_are_the_same(self):
        self.write("bad.py", "class Codec:\n def __init__(self, bucket): self.rank = bucket.rank\n"
                   " def encode(self, g): return g if self.rank else g[0][0]\n"
                   " def decode(self, m): return m[0]\n")
        spec = ("--compression", "bad.py:dense=off")
        for process in self.start(2, "train", *SYNTHETIC, "--steps", "3", *spec):
            _, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 2, errors)
            self.assertIn("rank 0, step 0", errors)

    def test_files_that_are_no_codec_are_refused(self):
        self.write("empty.py", "")
        self.write("syntax.py", "class Codec\n")
        self.write("half.py", "class Codec:\n def __init__(self, b): pass\n def encode(self, g): return g\n")
        self.write("keys.py", "class Codec:\n def __init__(self, b, k): raise ValueError(k)\n")
        for spec, parts in (("missing.py", ["missing.py"]), ("empty.py", ["no class Codec"]),
                            ("syntax.py", ["line 1", "SyntaxError"]), ("half.py", ["no method decode()"]),
                            ("keys.py:k=41", ["keys.py:k=41", "line 2", "ValueError: 41"]),
                            ("keys.py:q=1", ["unexpected keyword", "q"])):
            self.assert_refused(self.train(spec, "--steps", 1), *parts)
        without = self.run_command("train", *SYNTHETIC, "--ranks", 2, "--compression", "half.py:dense=off",
                                   env={"GRADWIRE_PYTHON": "/nowhere/python"})
        self.assert_refused(without, "/nowhere/python", "install python3")
        self.write("accent.py", "import numpy, extra  # \u00e9\n" + EF21.read_text())
        (self.folder / "pp").mkdir()
        self.write("pp/extra.py", "")
        self.write("pp/json.py", "raise SystemExit(7)")
        for variables in ({"PYTHONHOME": "/nowhere"}, {"PYTHONSAFEPATH": "1"},
                          {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
            result = self.run_command("train", *SYNTHETIC, "--ranks", 2, "--steps", 1, "--compression",
                                      "accent.py:dense=off", env={"PYTHONPATH": "pp", **variables})
            self.assertEqual((result.returncode, result.stderr), (0, ""))
        ended = self.run_words("env", "--ignore-signal=CHLD", self.program, "train", *SYNTHETIC, "--ranks", 2,
                               "--compression", "half.py:dense=off",
                               env={"GRADWIRE_PYTHON": "/usr/bin/false"})
        self.assert_refused(ended, "ended with exit status 1")
        cluster = EF21.parents[1] / "plan/clusters/h100-ib.json"
        predicted = self.run_command("plan", "--cluster", cluster, "--ranks", 8, "--compression", "half.py")
        self.assert_refused(predicted, "half.py", "name another spec")
        for flags in (["--shard", "full"], ["--checkpoint", "saved"], ["--graph"]):
            self.assert_refused(self.train("empty.py", *flags), "empty.py", flags[0])

    def test_gradients_that_are_not_finite_do_not_reach_the_codec(self):
        # The learning rate makes the loss overflow.
        body = " def encode(self, g):\n  assert numpy.isfinite(g).all()\n  return g\n"
        result = self.run_codec(body, "--lr", "1e6", "--optimizer", "sgd", "--log", "run.jsonl", steps=8)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (3, 1))
        self.assertIsNone([r["loss"] for r in self.records() if r["type"] == "step"][-1])


if __name__ == "__main__":
    main()
