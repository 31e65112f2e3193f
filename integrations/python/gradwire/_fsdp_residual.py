"""Error feedback for FSDP: the residual of a parameter group's gradients, by parameter.

FSDP2 reduces a group's gradients in one buffer of rows x shard elements. Row r is rank r's shard, and a
parameter has the same columns in every row. The residual has the same layout, so it is used in place. It is
rearranged when the set of parameters with a gradient changes between steps.
"""
from __future__ import annotations

import copy
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

# Elements per float32 scale of residual="int8": 1.03 bytes per element in total.
BLOCK = 128
# Elements packed at a time; bounds the temporary memory.
_PIECE = 1 << 22
MODES = ("fp32", "bf16", "int8", "off")


class Part(NamedTuple):
    """A parameter's columns in each row: `count` elements from `begin`. dense: sent uncompressed."""

    name: str
    begin: int
    count: int  # type: ignore[assignment]  # not tuple's method
    dense: bool

    @property
    def end(self) -> int:
        return self.begin + self.count


class Layout(NamedTuple):
    """The parameters of one buffer of rows x shard elements, in order."""

    parts: Tuple[Part, ...]
    rows: int
    shard: int

    @property
    def dense(self) -> List[Part]:
        return [part for part in self.parts if part.dense]


class _Packed:
    """Float32 values in 4, 2 or 1.03 bytes per element, rounded stochastically: unbiased.

    Rounding to nearest would lose the same small values in every step (docs/numerics.md).
    """

    def __init__(self, mode: str, values: torch.Tensor, generator: torch.Generator) -> None:
        self.count = values.numel()
        self.scales: Optional[torch.Tensor] = None
        if mode == "fp32":
            self.data = values
            return
        if mode == "bf16":
            self.data = torch.empty(self.count, dtype=torch.bfloat16, device=values.device)
        else:
            blocks = -(-self.count // BLOCK)
            self.data = torch.empty(blocks * BLOCK, dtype=torch.int8, device=values.device)
            self.scales = torch.empty(blocks, dtype=torch.float32, device=values.device)
        for begin in range(0, self.count, _PIECE):
            piece = values[begin:begin + _PIECE]
            if self.scales is None:
                noise = torch.randint(0, 1 << 16, piece.shape, dtype=torch.int32, device=piece.device,
                                      generator=generator)
                bits = (piece.view(torch.int32) + noise) & -(1 << 16)
                self.data[begin:begin + piece.numel()].copy_(bits.view(torch.float32))
                continue
            padded = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
            scale = padded.abs().amax(dim=1) / 127
            noise = torch.rand(padded.shape, dtype=torch.float32, device=piece.device,
                               generator=generator)
            codes = (padded / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
                     + noise).floor_().clamp_(-127, 127)
            self.data[begin:begin + padded.numel()].copy_(codes.view(-1))
            self.scales[begin // BLOCK:begin // BLOCK + scale.numel()].copy_(scale)

    def values(self) -> torch.Tensor:
        """Returns a float32 tensor (count,), which is not a copy if the mode is "fp32"."""
        if self.data.dtype == torch.float32:
            return self.data
        if self.scales is None:
            return self.data.float()
        values = self.data.float().view(-1, BLOCK).mul_(self.scales[:, None])
        return values.view(-1)[:self.count]

    def scaled(self, factor: float) -> "_Packed":
        """Returns the values times `factor`. Powers of two are exact."""
        other = copy.copy(self)
        if self.scales is None:
            other.data = self.data * factor
        else:
            other.scales = self.scales * factor
        return other

    @property
    def bytes(self) -> int:
        scales = 0 if self.scales is None else 4 * self.scales.numel()
        return self.data.numel() * self.data.element_size() + scales


class _Kept(NamedTuple):
    """A snapshot of a Residual before a step."""

    layout: Optional[Layout]
    packed: Optional[_Packed]
    parked: Dict[str, _Packed]
    steps: int


class Residual:
    """The residual of one parameter group's buffer. mode: one of MODES except "off"."""

    def __init__(self, mode: str, device: torch.device, seed: int) -> None:
        self._mode = mode
        self._device = device
        self._seed = seed
        self._layout: Optional[Layout] = None
        self._packed: Optional[_Packed] = None
        self._parked: Dict[str, _Packed] = {}  # residuals of parameters that are not in _layout
        self._open: Optional[torch.Tensor] = None
        self.steps = 0
        self.can_undo = False  # keep a snapshot from before a step until settle()
        self._before: Optional[_Kept] = None

    def open(self, layout: Layout) -> torch.Tensor:
        """Returns a float32 tensor (rows * shard,) for reading and writing until close()."""
        if self.can_undo and self._before is None:
            # A step changes "fp32" memory in place; in other modes it creates a new _Packed.
            packed = (self._packed.scaled(1.0) if self._packed is not None and self._mode == "fp32"
                      else self._packed)
            self._before = _Kept(self._layout, packed, dict(self._parked), self.steps)
        if self._layout != layout:
            self._arrange(layout)
        assert self._packed is not None
        self._open = self._packed.values()
        return self._open

    def close(self) -> None:
        """Stores the changed values of open(). Not called in failed steps, whose residuals are undefined."""
        assert self._open is not None
        self.steps += 1
        if self._mode != "fp32":
            self._packed = self._pack(self._open)
        self._open = None

    def settle(self, factor: float, undo: bool) -> None:
        """Ends one or several steps. Restores the snapshot if `undo`, then scales residuals by `factor`."""
        if undo and self._before is not None:
            self._layout, self._packed, self._parked, self.steps = self._before
        self._before = None
        if factor != 1:
            self._packed = self._packed.scaled(factor) if self._packed is not None else None
            self._parked = {name: parked.scaled(factor) for name, parked in self._parked.items()}

    def _pack(self, values: torch.Tensor) -> _Packed:
        generator = torch.Generator(device=self._device)
        # The generator depends on seed and step only, so that a resumed run draws the same numbers.
        generator.manual_seed(self._seed * 1_000_003 + self.steps)
        return _Packed(self._mode, values, generator)

    def _arrange(self, layout: Layout) -> None:
        for name, values in self._current().items():
            self._parked[name] = self._pack(values.contiguous().view(-1))
        fresh = torch.zeros(layout.rows, layout.shard, dtype=torch.float32, device=self._device)
        for part in layout.parts:
            parked = self._parked.pop(part.name, None)
            if parked is not None:
                fresh[:, part.begin:part.end].copy_(parked.values().view(layout.rows, part.count))
        self._packed = self._pack(fresh.view(-1))
        self._layout = layout

    def _current(self) -> Dict[str, torch.Tensor]:
        if self._layout is None or self._packed is None:
            return {}
        values = self._packed.values().view(self._layout.rows, self._layout.shard)
        return {part.name: values[:, part.begin:part.end] for part in self._layout.parts if not part.dense}

    def state(self) -> Dict[str, torch.Tensor]:
        """Returns each existing residual by parameter name: float32 on the CPU, (rows * its shard,)."""
        everything = {name: parked.values() for name, parked in self._parked.items()}
        everything.update(self._current())
        return {name: values.detach().to("cpu", copy=True).contiguous().view(-1)
                for name, values in everything.items()}

    def load(self, state: Dict[str, torch.Tensor], steps: int) -> None:
        """Replaces all residuals by a state()."""
        self._layout = self._packed = self._before = None
        self.steps = steps
        self._parked = {name: self._pack(values.to(self._device, torch.float32, copy=True).view(-1))
                        for name, values in state.items()}

    @property
    def bytes(self) -> int:
        """Returns the bytes in use between steps on this rank's device."""
        packed = 0 if self._packed is None else self._packed.bytes
        return packed + sum(parked.bytes for parked in self._parked.values())
