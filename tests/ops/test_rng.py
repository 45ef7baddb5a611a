"""Philox and seeds: golden vectors, the public mask, what a (seed, offset) pair may be."""

from __future__ import annotations

import hashlib

import pytest
import torch
from onetrip import ops
from onetrip.ops.common.rng import draw_rng, draw_rng_tensor
from onetrip.reference.philox import dropout_scale, dropout_threshold, keep_mask, philox

pytestmark = pytest.mark.promise("D4")

# Random123's kat_vectors for philox4x32-10: counter (four words), key (two words), result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def signed(low: int, high: int) -> int:
    value = low | high << 32
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
@pytest.mark.parametrize("form", ["ints", "unsigned", "tensor"])
def test_philox_gives_random123s_known_answers(form, counter, key, result):
    c, k, r = ([int(word, 16) for word in words.split()] for words in (counter, key, result))
    rng = (signed(*k), signed(*c[:2]))
    if form == "unsigned":
        rng = tuple(part % 2**64 for part in rng)
    group = torch.tensor([signed(*c[2:])])
    words = philox(torch.tensor(rng) if form == "tensor" else rng, group)
    assert [int(word) for word in words] == r


def test_masks_are_pinned():
    """No release may change which elements a (seed, offset) drops."""
    mask = ops.dropout_keep_mask((512, 129), 0.25, (0x123456789ABCDEF0, 4))
    assert hashlib.sha256(mask.numpy().tobytes()).hexdigest()[:16] == "be96c91adc9ad15e"


@pytest.mark.parametrize("first", [0, 1, 2, 3, 5, 2**32 - 3, 2**32 + 1, 2**34 + 2])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_a_mask_cut_anywhere_is_the_same_mask(first, count):
    start = first - first % 4
    whole = keep_mask((32,), 0.5, (8, 0), first_element=start)
    assert torch.equal(keep_mask((count,), 0.5, (8, 0), first_element=first), whole[first - start :][:count])


def test_threshold_and_scale():
    assert [dropout_threshold(p) for p in (0.0, 0.5, 1.0, 2**-33, 2**-32)] == [0, 2**31, 2**32, 0, 1]
    assert [dropout_scale(p) for p in (0.0, 0.5, 1.0)] == [1.0, 2.0, 0.0]
    assert ops.dropout_keep_mask((100,), 0.0, (1, 0)).all() and not ops.dropout_keep_mask((100,), 1.0, (1, 0)).any()


def test_an_element_is_kept_iff_its_bits_reach_the_threshold():
    words = torch.stack(philox((6, 0), torch.arange(4)), dim=-1).flatten()
    p = (int(words[5]) + 0.0) / 2**32  # exact in float64: the threshold is this element's own bits
    assert ops.dropout_keep_mask((16,), p, (6, 0))[5]
    assert not ops.dropout_keep_mask((16,), p + 2**-32, (6, 0))[5]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (5,), torch.Size((2, 3)), [2, 3]], ids=str)
def test_mask_shapes(shape):
    mask = ops.dropout_keep_mask(shape, 0.5, (1, 2))
    assert mask.shape == torch.Size(shape) and mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, ((4,), 0.5, None)),
        (TypeError, ((4,), 0.5, 7)),
        (TypeError, ((4,), 0.5, (True, 0))),
        (TypeError, ((4,), "half", (0, 0))),
        (ValueError, ((4,), 1.01, (0, 0))),
        (ValueError, ((4,), float("nan"), (0, 0))),
        (ValueError, ((4,), 0.5, (2**64, 0))),
        (ValueError, ((4,), 0.5, (0, -(2**63) - 1))),
    ],
    ids=["no-rng", "one-int", "bool", "p-string", "p-above-one", "p-nan", "seed-65-bits", "offset-65-bits"],
)
def test_wrong_arguments_of_the_mask_are_refused(error, arguments):
    with pytest.raises(error, match=r"^dropout_keep_mask: (rng|dropout_p) must be"):
        ops.dropout_keep_mask(*arguments)


def test_drawn_pairs_are_fresh_64_bit_seeds():
    pairs = [draw_rng(torch.device("cpu")) for _ in range(200)]
    seeds = [seed for seed, _ in pairs]
    assert len(set(pairs)) == 200
    assert max(seeds).bit_length() > 56  # not 32-bit seeds in disguise
    tensors = torch.stack([draw_rng_tensor(torch.device("cpu")) for _ in range(200)])
    assert tensors.unique(dim=0).shape[0] == 200 and (tensors < 0).any() and (tensors > 2**56).any()


def test_an_rng_tensor_draws_the_same_mask_as_the_pair():
    for pair in ((5, 8), (-3, 2**40), (-(2**63), -4)):
        assert torch.equal(keep_mask((99,), 0.5, torch.tensor(pair)), keep_mask((99,), 0.5, pair))
