#!/usr/bin/env python3
"""Decodes every wire format with a decoder written from docs/formats.md, bit for bit like the library.

Usage: wire_oracle_test.py WIRE_ORACLE_BINARY
"""
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np

F32, U8, U32 = np.float32, np.uint8, np.uint32
NAN = F32(np.nan)


def power_of_two(byte) -> np.ndarray:
    return (np.asarray(byte, U32) << 23).view(F32)


def floats(data) -> np.ndarray:
    return np.frombuffer(bytes(data), "<f4")


def codes(data: np.ndarray, n: int, bits: int) -> np.ndarray:
    """Unpacks n codes ("Codes") from n * bits / 8 bytes."""
    if bits in (3, 5, 6):
        low = 2 if bits == 3 else 4
        return codes(data[:n * low // 8], n, low) | codes(data[n * low // 8:], n, bits - low) << low
    return np.concatenate(
        [data.astype(np.int64) >> (part * bits) & (1 << bits) - 1 for part in range(8 // bits)])


def small_float(code: np.ndarray, mantissa: int, bias: int) -> np.ndarray:
    """Returns the magnitudes of floats with few bits."""
    exponent, fraction = code >> mantissa, code & (1 << mantissa) - 1
    normal = (1 + fraction / 2.0**mantissa) * 2.0**(exponent - bias)
    return np.where(exponent == 0, fraction / 2.0**mantissa * 2.0**(1 - bias), normal).astype(F32)


def e4m3(code: np.ndarray) -> np.ndarray:
    value = np.where(code & 127 == 127, NAN, small_float(code & 127, 3, 7))
    return np.where(code & 128, -value, value).astype(F32)


def mini(code: np.ndarray, mantissa: int) -> np.ndarray:
    sign = 4 << mantissa
    value = small_float(code & sign - 1, mantissa, 1)
    return np.where(code & sign, -value, value).astype(F32)


def signed(value: np.ndarray, negative: np.ndarray) -> np.ndarray:
    return np.where(negative, -value, value).astype(F32)


def negative_signs(n: int) -> np.ndarray:
    x = (np.arange(1, n + 1, dtype=np.uint64) * 0x9e3779b1 & 0xffffffff)
    x ^= x >> np.uint64(15)
    return (x * 0x85ebca6b & 0x80000000) != 0


def rotate_back(values: np.ndarray) -> np.ndarray:
    x, n = values * F32(2.0**-10), len(values)
    half = n // 2
    while half > 0:
        pairs = x.reshape(-1, 2, half)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(n).astype(F32)
        half //= 2
    most = np.finfo(F32).max * F32(2.0**-10)
    return signed(np.clip(x, -most, most) * F32(2.0**10), negative_signs(n))


LEVELS = {1: [0.7978846], 2: [0.45278, 1.510418], 3: [0.2450942, 0.7560053, 1.343909, 2.151946],
          4: [0.128395, 0.3880483, 0.6567591, 0.9423405, 1.256231, 1.618046, 2.069017, 2.73259],
          5: [0.06588966, 0.1980518, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.048783,
              1.211804, 1.38634, 1.576228, 1.787233, 2.028728, 2.317739, 2.69112, 3.260732]}

# Defaults of the options, and the length of the scale.
DEFAULTS = {"int8": dict(block=128, scale="pow2"), "int4": dict(block=128, scale="fp32"),
            "int2": dict(block=128, scale="fp32"), "mxfp8": dict(block=32), "mxfp6": dict(block=32),
            "mxfp4": dict(block=32), "nvfp4": dict(block=128), "natural": dict(block=128),
            "qsgd": dict(block=512, bits=8), "terngrad": dict(block=128), "sign": dict(block=512),
            "eden": dict(block=512, bits=4, rotate="hadamard"), "varbits": dict(bits=3),
            "topk": dict(k=64, of=4096, values="bf16")}


def code_bits(name: str, option: dict) -> int:
    return {"int8": 8, "int4": 4, "int2": 2, "mxfp8": 8, "mxfp6": 6, "mxfp4": 4, "nvfp4": 4, "natural": 8,
            "terngrad": 2, "sign": 1}.get(name) or option["bits"]


def scale_bytes(name: str, option: dict) -> int:
    if name.startswith("int"):
        return 4 if option["scale"] == "fp32" else 1
    return 4 if name in ("qsgd", "terngrad", "sign", "eden") else 1


def decode_codes(name: str, option: dict, code: np.ndarray, middle: np.ndarray,
                 scale: np.ndarray) -> np.ndarray:
    """Returns the values of a block that is not a mask."""
    factor = floats(scale)[0] if len(scale) == 4 else power_of_two(scale)[0]
    if name.startswith("int"):
        bits = code_bits(name, option)
        number = np.where(code >= 1 << bits - 1, code - (1 << bits), code)
        return np.where(number == -(1 << bits - 1), NAN, factor * number.astype(F32)).astype(F32)
    if name == "mxfp8":
        return factor * e4m3(code)
    if name in ("mxfp6", "mxfp4"):
        return factor * mini(code, 3 if name == "mxfp6" else 1)
    if name == "nvfp4":
        return factor * (np.repeat(e4m3(middle.astype(np.int64)), 16) * mini(code, 1))
    if name == "natural":
        low = code & 127
        bits = np.where(low == 0, 0, int(scale[0]) + low - 126 << 23)
        bits = np.where(low == 127, 0x7fc00000, bits) | (code >> 7 << 31)
        return bits.astype(U32).view(F32)
    if name == "qsgd":
        sign = 1 << option["bits"] - 1
        unit = factor / F32(sign - 1)
        return signed(unit * (code & sign - 1).astype(F32), code & sign != 0)
    if name == "terngrad":
        return signed(np.where(code == 0, F32(0), factor), code == 2)
    if name == "sign":
        return signed(np.full(len(code), factor), code != 0)
    levels, sign = np.array(LEVELS[option["bits"]], F32), 1 << option["bits"] - 1
    return signed(factor * levels[code & sign - 1], code & sign != 0)


def bits_of(data: np.ndarray) -> np.ndarray:
    return np.unpackbits(data, bitorder="little").astype(np.int64)


def topk_fields(option: dict) -> tuple:
    """Returns the number of low bits of a position, and the lengths of the fields of positions."""
    k, low = option["k"], (option["of"] // option["k"]).bit_length() - 1
    return low, (k + (option["of"] >> low) + 7) // 8, (k * low + 7) // 8


def decode_topk(option: dict, data: np.ndarray) -> np.ndarray:
    k, kind = option["k"], option["values"]
    low, first, second = topk_fields(option)
    lows = bits_of(data[first:first + second])[:k * low].reshape(k, low)
    places = np.flatnonzero(bits_of(data[:first])) - np.arange(k) << low | lows @ (1 << np.arange(low))
    rest = data[first + second:]
    if kind == "fp32":
        values = floats(rest)
    elif kind == "bf16":
        values = (rest.view("<u2").astype(U32) << 16).view(F32)
    elif kind == "int8":
        values = floats(rest[k:])[0] * (F32(1) / F32(127)) * rest[:k].view(np.int8).astype(F32)
        values[rest[:k] == 128] = NAN
    else:
        code = (rest[:(k + 3) // 4, None] >> np.array([0, 2, 4, 6], U8) & 3).reshape(-1)[:k]
        means = np.minimum(floats(rest[(k + 3) // 4:]), np.finfo(F32).max)
        values = signed(means[code & 1], code & 2 != 0)
    block = np.zeros(option["of"], F32)
    block[places] = values
    return block


def part_bits(q: np.ndarray, level: int) -> np.ndarray:
    return np.where(q == 63, 1, np.clip((3 * (q - level) + 9) // 10, 0, 5))


def decode_varbits(option: dict, data: np.ndarray) -> np.ndarray:
    q, total = codes(data[-49:-1], 64, 6), varbits_total(option)
    level = next(t for t in range(-13, 64) if part_bits(q, t).sum() <= total)
    bits = part_bits(q, level)
    bits[np.flatnonzero(part_bits(q, level - 1) > bits)[:total - bits.sum()]] += 1
    quarters = 4 * int(data[-1]) + q - 62
    scales = (2.0**(quarters // 4 - 127) * (2.0**(quarters % 4 / 4)).astype(F32)).astype(F32)
    scales[(q == 0) | (quarters < 4)] = 0
    parts, at = [], 0
    for b, scale, mask in zip(bits.tolist(), scales, q == 63):
        field, at = data[at:at + 8 * b], at + 8 * b
        if mask:
            parts.append(np.where(codes(field, 64, 1) != 0, NAN, F32(0)))
        elif b == 0 or scale == 0:
            parts.append(np.zeros(64, F32))
        else:
            code, sign = codes(field, 64, b), 1 << b - 1
            values = signed(scale * np.array(LEVELS[b], F32)[code & sign - 1], code & sign != 0)
            parts.append(rotate_back(values))
    return np.concatenate(parts)


def varbits_total(option: dict) -> int:
    return max(64 * option["bits"] - 3, 64)


def decode(spec: str, data: np.ndarray, count: int) -> np.ndarray:
    name, _, given = spec.partition(":")
    if name == "bf16":
        return (data.view("<u2").astype(U32) << 16).view(F32)
    if name == "fp8":
        scales = data[(count + 15) // 16 * 16:]
        return np.repeat(power_of_two(scales), 128)[:count] * e4m3(data[:count].astype(np.int64))
    if name not in DEFAULTS:
        sys.exit(f"tests/oracles/wire_oracle_test.py has no decoder for the format {name}: write one from "
                 "what docs/formats.md says about its bytes: a row of DEFAULTS and a case in decode_codes()")
    option = {"rotate": "off", **DEFAULTS[name]}
    for item in given.split(",") if given else []:
        key, _, value = item.partition("=")
        option[key] = int(value) if value.isdigit() else value
    if name == "topk":
        length = sum(topk_fields(option)[1:]) + {
            "fp32": 4 * option["k"], "bf16": 2 * option["k"], "int8": option["k"] + 4,
            "int2": (option["k"] + 3) // 4 + 8}[option["values"]]
        return np.concatenate([decode_topk(option, block) for block in data.reshape(-1, length)])[:count]
    if name == "varbits":
        blocks = data.reshape(-1, 8 * varbits_total(option) + 49)
        return np.concatenate([decode_varbits(option, block) for block in blocks])[:count]
    n, bits, tail = option["block"], code_bits(name, option), scale_bytes(name, option)
    length = n * bits // 8 + (8 if name == "nvfp4" else 0) + tail
    assert len(data) == (count + n - 1) // n * length, (spec, count, len(data))
    masks = option["rotate"] != "off" or name in ("mxfp6", "mxfp4", "nvfp4", "qsgd", "terngrad", "sign",
                                                  "eden")
    blocks = []
    for block in data.reshape(-1, length):
        scale = block[-tail:]
        is_mask = scale[0] == 255 if tail == 1 else not np.isfinite(floats(scale)[0])
        if masks and is_mask:
            blocks.append(np.where(np.unpackbits(block[:n // 8], bitorder="little"), NAN, F32(0)).astype(F32))
            continue
        code = codes(block[:n * bits // 8], n, bits)
        values = decode_codes(name, option, code, block[n * bits // 8:-tail], scale)
        blocks.append(rotate_back(values) if option["rotate"] != "off" else values)
    return np.concatenate(blocks)[:count]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "wires"
        subprocess.run([sys.argv[1], path], check=True, timeout=120)
        data = path.read_bytes()
    at, cases, specs, bad = 0, 0, set(), 0
    with np.errstate(all="ignore"):
        while at < len(data):
            length, count, size = struct.unpack_from("<3q", data, at)
            at += 24
            spec = data[at:at + length].decode()
            wire = np.frombuffer(data, U8, size, at + length).copy()
            want = np.frombuffer(data, "<f4", count, at + length + size)
            at += length + size + 4 * count
            got = decode(spec, wire, count)
            same = (got.view(U32) == want.view(U32)) | (np.isnan(got) & np.isnan(want))
            cases += 1
            specs.add(spec)
            if not same.all():
                bad += 1
                i = int(np.argmin(same))
                print(f"{spec}, {count} values: value {i} is {want[i]!r}, by the page {got[i]!r}")
    print(f"{cases} wires of {len(specs)} specs, {bad} differ")
    if bad or cases < 500:
        sys.exit(1)


if __name__ == "__main__":
    main()
