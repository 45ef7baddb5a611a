"""Rotations of the first columns of each head, around which a forward slices and joins (Phi, StableLM, Persimmon)."""

from __future__ import annotations

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.rotary import read_rotations
from patching_cases import written
from rotary_cases import llama
from torch import Tensor, nn

N_ROTATED = 4
Pair = tuple[Tensor, Tensor]


class InPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.n_rotated = nn.Linear(2, 2), N_ROTATED  # only a module with children can have a rotation

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        q_part, q_rest = q[..., : self.n_rotated], q[..., self.n_rotated :]
        k_part, k_rest = k[..., : self.n_rotated], k[..., self.n_rotated :]
        q_part, k_part = llama(q_part, k_part, cos, sin)
        q = torch.cat((q_part, q_rest), dim=-1)
        k = torch.cat((k_part, k_rest), dim=-1)
        return q, k


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 8), (2, 2, 5, 8), (2, 5, N_ROTATED), (2, 5, N_ROTATED)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_one_operator_takes_the_place_of_slices_and_joins() -> None:
    model, original, given = InPart(), InPart(), inputs()
    report = patch_model(model)
    assert all(map(torch.equal, model(*given), original(*given)))
    assert report.calls() == {"": (1, 0)}
    added = [line for line in report.diff("").splitlines() if line.startswith("+ ")]
    assert added == ["+    q, k = rotated_0_(self, llama, None, self.n_rotated, q, k, cos, sin)"]


def test_what_the_operator_does_not_take_is_sliced_and_joined() -> None:
    model, original, given = InPart(), InPart(), inputs()
    report = patch_model(model)
    wide = [x.double() for x in given]
    assert all(map(torch.equal, model(*wide), original(*wide)))
    model.n_rotated = 2
    with pytest.raises(RuntimeError, match="must match the size of tensor"):  # of cos, which has 4 columns
        model(*given)
    assert report.calls() == {"": (0, 2)}


BODY = """\
q_part, q_rest = q[..., :4], q[..., 4:]
k_part, k_rest = k[..., :4], k[..., 4:]
q_part, k_part = llama(q_part, k_part, cos, sin)
q = torch.cat((q_part, q_rest), dim=-1)
k = torch.cat((k_part, k_rest), dim=-1)
return q, k
"""
CHANGES = {
    "a part is read later": [("return q, k", "return q, k + q_part.sum()")],
    "the rest is read later": [("return q, k", "return q, k + k_rest.sum()")],
    "the rest is read in a function": [("return q, k", "return attend(lambda: k_rest)")],
    "a part is deleted": [("return q, k", "del q_part; return q, k")],
    "the rest changes": [("k = torch", "k_rest *= 2; k = torch")],
    "a part changes": [("q_part, k_part = l", "q_part *= 2; q_part, k_part = l")],
    "a view of the result": [("return q, k", "q = q.view(-1); return q, k")],
    "a view of a cast of the result": [("return q, k", "q = q.to(k.dtype).view(-1); return q, k")],
    "strides of the result": [("return q, k", "return attend(k.stride())")],
    "other columns of k": [("k[..., :4], k[..., 4:]", "k[..., :3], k[..., 3:]")],
    "columns that overlap": [("k[..., :4], k[..., 4:]", "k[..., :4], k[..., 3:]")],
    "columns by a call": [(":4]", ":f()]"), ("4:]", "f():]"), (":4]", ":f()]"), ("4:]", "f():]")],
    "of what is no name": [("q[..., :4], q[..., 4:]", "q.x[..., :4], q.x[..., 4:]"), ("q = torch", "q.x = torch")],
    "the rest first": [("(q_part, q_rest)", "(q_rest, q_part)")],
    "one rest for both": [("k_part, k_rest = k", "k_part, q_rest = k"), ("(k_part, k_rest), d", "(k_part, q_rest), d")],
    "joined to the other": [("q = torch", "k = torch"), ("k = torch.cat((k_", "q = torch.cat((k_")],
    "other dimension": [("dim=-1)", "dim=0)")],
    "other names of what is rotated": [("q_part, k_part = llama", "q_turned, k_part = llama")],
    "other names of what is joined": [("q = torch", "q_turned = torch")],
    "something between": [("q = torch", "print(); q = torch")],
    "a positional argument": [("cos, sin)", "cos, sin, 1)")],
    "a keyword argument": [("cos, sin)", "cos, sin, unsqueeze_dim=1)")],
    "no slices": [("q_part, q_rest = q[..., :4], q[..., 4:]\n", "")],
}


def parts(body: str) -> list[bool]:
    forward = read_forward(written(InPart, body, globals(), "q, k, cos, sin").forward)
    assert isinstance(forward, Forward)
    return [each.part is not None for each in read_rotations(forward)]


def test_statements_that_are_part_of_a_rotation() -> None:
    assert parts(BODY) == [True]


@pytest.mark.parametrize("name", CHANGES)
def test_statements_that_do_something_else_stay(name: str) -> None:
    body = BODY
    for old, new in CHANGES[name]:
        assert old in body
        body = body.replace(old, new, 1)
    assert parts(body) == [False]


def test_a_loop_stays() -> None:
    looped = "for _ in range(2):\n" + "".join(f"    {line}\n" for line in BODY.splitlines())
    assert parts(looped) == [False]
