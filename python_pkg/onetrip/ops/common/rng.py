"""Seeds of dropout: drawn from torch's generators, so that torch.manual_seed and checkpointing behave as users
expect."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ...reference.philox import Rng, keep_mask, signed
from ...reference.philox import dropout_scale as dropout_scale
from .checks import check_probability

_CPU = torch.device("cpu")
_ANY_RNG = (0, 0)  # p = 1 drops all: the generator does not move
_OFFSET_STEP = 4  # torch reserves Philox offsets in multiples of four


def check_rng(function: str, rng: object, may_be_none: bool = True) -> None:
    """rng must be None or a (seed, offset) pair of 64-bit ints, signed or unsigned."""
    if rng is None and may_be_none:
        return
    if not (isinstance(rng, tuple) and len(rng) == 2 and all(type(part) is int for part in rng)):
        wanted = "None or a" if may_be_none else "a"
        raise TypeError(f"{function}: rng must be {wanted} (seed, offset) pair of ints, got {rng!r}")
    if not all(-(2**63) <= part < 2**64 for part in rng):
        raise ValueError(f"{function}: rng must be a pair of 64-bit ints, got {rng!r}")


def draw_rng_tensor(device: torch.device) -> Tensor:
    """(seed, offset) as an int64 tensor of shape (2,): drawn anew by every replay of a graph."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


class _Draws(threading.local):
    """A tensor a thread, to draw 63 random bits from torch's CPU generator into."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty((), dtype=torch.int64, device="cpu")


_draws = _Draws()


def draw_rng(device: torch.device) -> Rng:
    """(seed, offset) of one call, from the default generator of the device, which moves on."""
    if device == _CPU:
        # torch's CPU generator is a Mersenne twister without an offset: each call draws a fresh key.
        seed: int = _draws.tensor.random_().item()  # type: ignore[assignment]
        return seed, 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return draw_rng_tensor(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        offset = generator.get_offset()
        generator.set_offset(offset + _OFFSET_STEP)
        return generator.initial_seed(), offset
    return draw_rng_tensor(device)


def eager_rng(rng: tuple[int, int] | None, dropout_p: float, device: torch.device) -> Rng | None:
    """(seed, offset) of an eager call: the caller's, or drawn; None where nothing is dropped."""
    if rng is not None or dropout_p == 0.0:
        return rng
    return draw_rng(device) if dropout_p < 1.0 else _ANY_RNG


def traced_rng(rng: tuple[int, int] | None, dropout_p: float, device: torch.device) -> Tensor | None:
    """The same as an int64 tensor of shape (2,), which a graph can hold."""
    if dropout_p == 0.0:
        return None
    if rng is None and dropout_p < 1.0:
        return draw_rng_tensor(device)
    return torch.tensor([signed(part) for part in rng or _ANY_RNG], dtype=torch.int64, device=device)


def dropout_keep_mask(
    shape: tuple[int, ...], dropout_p: float, rng: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """The exact mask that any operator draws for this shape, probability and (seed, offset).

    shape: of the operator's x. dropout_p: in [0, 1]. rng: a pair of ints. Returns a bool tensor, True where kept.
    Source: Philox4x32 with 7 rounds (Salmon et al. 2011); element e takes 16 bits of block (seed, offset, e // 8), half
    e % 2 of word e % 8 // 2, and is kept iff they are at least round(65536 * p), or 1 to 65535 where 0 < p < 1.
    Raises ValueError for p outside [0, 1], TypeError for anything else than a pair of ints.
    """
    if not isinstance(shape, (tuple, list)) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise TypeError(f"dropout_keep_mask: shape must be a tuple of sizes >= 0, got {shape!r}")
    check_probability("dropout_keep_mask", "dropout_p", dropout_p)
    check_rng("dropout_keep_mask", rng, may_be_none=False)
    return keep_mask(tuple(shape), dropout_p, rng, device)
