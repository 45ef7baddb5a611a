"""Other parameters have gradients at each step, as the experts of a mixture do: one table serves every choice."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from onetrip.optim import AdamW8bit, table
from optim_cases import make_params, same, set_grads
from torch import Tensor

pytestmark = pytest.mark.promise("adam varying")

SHAPES = [(4096,), (5000,), (7,), (0,), (64, 100), (130,), (), (4097,)]


class Pair:
    """One optimizer of two groups, and for each parameter one of its own, which never sees another set."""

    def __init__(self, dtypes: Iterable[torch.dtype]) -> None:
        self.params = [torch.nn.Parameter(p.detach().to(dtype)) for dtype in dtypes for p in make_params(SHAPES)]
        self.expected = [torch.nn.Parameter(p.detach().clone()) for p in self.params]
        half = len(self.params) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:], "lr": 0.02}]
        self.optimizer = AdamW8bit(groups, lr=0.1)
        self.singles = [AdamW8bit([p], lr=0.1 if i < half else 0.02) for i, p in enumerate(self.expected)]

    def step(self, present: Iterable[int], step: int) -> None:
        present = set(present)
        set_grads(self.params, step)
        set_grads(self.expected, step)
        for i, p in enumerate(self.params):
            if i not in present:
                p.grad = None
        self.optimizer.step()
        for i in sorted(present):
            self.singles[i].step()

    def agrees(self) -> bool:
        states = all(
            same(self.optimizer.state.get(p, {}), single.state.get(q, {}))
            for p, q, single in zip(self.params, self.expected, self.singles, strict=True)
        )
        return states and same([p.detach() for p in self.params], [p.detach() for p in self.expected])


@pytest.fixture
def tables(monkeypatch) -> list[list[Tensor]]:
    """The parameters of every table that is built."""
    built = []

    class Counted(table.StepTable):
        def __init__(self, members, *rest) -> None:
            super().__init__(members, *rest)
            built.append([member.param for member in members])

    monkeypatch.setattr(table, "StepTable", Counted)
    return built


@pytest.mark.promise("Q10")
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float32, torch.bfloat16, torch.float16)], ids=["f32", "mixed"]
)
def test_any_set_after_any_other(dtypes, tables):
    """Q10: None gradients; each counts its own steps. New parameters join for some steps; then every set is made from
    what is known."""
    pair, generator = Pair(dtypes), random.Random(0)
    n = len(pair.params)
    for step in range(30):
        if step == 10:
            pair.step(range(n), step)
            tables.clear()
        pair.step(generator.sample(range(n), generator.randint(0, n)), step)
    assert pair.agrees() and not tables


@pytest.mark.parametrize("known", [range(len(SHAPES)), [0, 1]], ids=["all_known", "others_join"])
def test_a_parameter_spoilt_while_it_rests_is_refused_at_its_turn_only(known):
    pair = Pair([torch.float32])
    pair.step(known, 0)
    pair.params[1].grad = None
    pair.params[1].data = pair.params[1].data.double()
    for step in (1, 2):
        pair.step([0, 2, 4 + step], step)
    with pytest.raises(TypeError, match=r"got float64 .* for parameter 1"):
        pair.step([1, 2], 3)
