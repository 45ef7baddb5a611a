"""Philox and seeds: golden vectors, the public mask, what a (seed, offset) pair may be."""

from __future__ import annotations

import hashlib

import pytest
import torch
from onetrip import ops
from onetrip.ops.common.rng import draw_rng, draw_rng_tensor
from onetrip.reference.philox import dropout_scale, dropout_threshold, keep_mask, philox

pytestmark = pytest.mark.promise("D4")

# Random123's kat_vectors for philox4x32 with 7 rounds: counter (four words), key (two words), result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
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
    assert hashlib.sha256(mask.numpy().tobytes()).hexdigest()[:16] == "f111acb872420b65"


@pytest.mark.parametrize("first", [0, 1, 2, 3, 5, 7, 2**32 - 3, 2**32 + 1, 2**35 - 2])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 17])
def test_a_mask_cut_anywhere_is_the_same_mask(first, count):
    start = first - first % 8
    whole = keep_mask((32,), 0.5, (8, 0), first_element=start)
    assert torch.equal(keep_mask((count,), 0.5, (8, 0), first_element=first), whole[first - start :][:count])


def test_threshold_and_scale():
    assert [dropout_threshold(p) for p in (0.0, 0.1, 0.5, 1.0)] == [0, 6554, 2**15, 2**16]
    assert [dropout_threshold(p) for p in (1e-30, 2**-17, 1 - 2**-17, 1 - 1e-16)] == [1, 1, 65535, 65535]
    assert [dropout_scale(p) for p in (0.0, 0.5, 1.0, 1e-30, 1 - 1e-16)] == [1.0, 2.0, 0.0, 65536 / 65535, 65536.0]
    for p in (1e-9, 0.1, 0.3, 0.9, 1 - 1e-9):
        assert (65536 - dropout_threshold(p)) / 65536 * dropout_scale(p) == pytest.approx(1.0, rel=1e-15)
    assert ops.dropout_keep_mask((100,), 0.0, (1, 0)).all() and not ops.dropout_keep_mask((100,), 1.0, (1, 0)).any()


def test_an_element_is_kept_iff_its_bits_reach_the_threshold():
    words = torch.stack(philox((6, 0), torch.arange(2)), dim=-1).flatten().tolist()
    bits = [half for word in words for half in (word % 2**16, word // 2**16)]  # of each element
    assert len(bits) == 16
    for element, own in enumerate(bits):  # the threshold is this element's own bits
        assert ops.dropout_keep_mask((16,), own / 65536, (6, 0))[element]
        assert not ops.dropout_keep_mask((16,), (own + 1) / 65536, (6, 0))[element]


@pytest.mark.promise("D1")
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_look_random(p):
    """Each element's own rate over many seeds, and pairs of neighbours: as independent draws, within 5 sigma."""
    n_seeds, n = 400, 2048
    masks = torch.stack([keep_mask((n,), p, (seed, 4 * seed)) for seed in range(n_seeds)]).double()
    share = 1.0 - dropout_threshold(p) / 65536
    sigma = (share * (1.0 - share)) ** 0.5
    assert abs(masks.mean() - share) < 5 * sigma / (n_seeds * n) ** 0.5
    for lane in range(8):
        assert abs(masks[:, lane::8].mean() - share) < 5 * sigma / (n_seeds * n / 8) ** 0.5
    for rates, count in ((masks.mean(0), n_seeds), (masks.mean(1), n)):
        assert (rates - share).abs().max() < 5.5 * sigma / count**0.5
        spread = ((rates - share) * count**0.5 / sigma).square().mean()  # chi square over its degrees of freedom
        assert abs(spread - 1.0) < 5 * (2 / rates.numel()) ** 0.5
    centred = (masks - share) / sigma
    for distance in (*range(1, 9), 16, 64, 1024):
        products = centred[:, distance:] * centred[:, :-distance]
        assert abs(products.mean()) < 5 / products.numel() ** 0.5
    assert abs((centred[1:] * centred[:-1]).mean()) < 5 / (n_seeds * n) ** 0.5


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (5,), torch.Size((2, 3)), [2, 3]], ids=str)
def test_mask_shapes(shape):
    mask = ops.dropout_keep_mask(shape, 0.5, (1, 2))
    assert mask.shape == torch.Size(shape) and mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, (3, 0.5, (1, 2))),
        (TypeError, ((3, -1), 0.5, (1, 2))),
        (TypeError, ((3, 1.0), 0.5, (1, 2))),
        (TypeError, (None, 0.5, (1, 2))),
        (TypeError, ((4,), 0.5, None)),
        (TypeError, ((4,), 0.5, 7)),
        (TypeError, ((4,), 0.5, (True, 0))),
        (TypeError, ((4,), "half", (0, 0))),
        (ValueError, ((4,), 1.01, (0, 0))),
        (ValueError, ((4,), float("nan"), (0, 0))),
        (ValueError, ((4,), 0.5, (2**64, 0))),
        (ValueError, ((4,), 0.5, (0, -(2**63) - 1))),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_mask_are_refused(error, arguments):
    with pytest.raises(error, match=r"^dropout_keep_mask: (shape|rng|dropout_p) must be (?!None)"):
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
