"""Optimizers of well-known packages train in replicas as in plain PyTorch.

The extra `optimizers` installs them. `python tests/published_optimizers` tries all of
their classes.
"""

from __future__ import annotations

import pytest

WHY = (
    "needs optimizers of well-known packages, which are not installed: pip install "
    "'.[optimizers]'"
)
for package in ("torch_optimizer", "pytorch_optimizer"):
    pytest.importorskip(package, reason=WHY)

from conditions import for_releases  # noqa: E402
from published_optimizers.recipes import Recipe, classes  # noqa: E402
from published_optimizers.trials import PLACES, STRATEGIES, Outcome, tried  # noqa: E402
from topologies import compute_devices  # noqa: E402

pytestmark = pytest.mark.slow
ALONE, AROUND, INSIDE = "a learning rate alone", "around SGD", "with SGD inside"
SAMPLE = [
    ("torch_optimizer.Yogi", ALONE, "step()"),  # writes through `.data`
    ("torch_optimizer.Shampoo", ALONE, "step()"),  # keeps matrices
    ("torch_optimizer.Lookahead", AROUND, "step()"),  # does not call `super().__init__`
    # Has `ABC` as its first base, as all of this package.
    ("pytorch_optimizer.Lion", ALONE, "step()"),
    ("pytorch_optimizer.Prodigy", ALONE, "step()"),  # learns its own rate
    ("pytorch_optimizer.VSGD", ALONE, "step()"),
    ("pytorch_optimizer.ScheduleFreeAdamW", ALONE, "step()"),
    ("pytorch_optimizer.Lookahead", AROUND, "step()"),  # computes its groups
    ("pytorch_optimizer.TRAC", AROUND, "step()"),
    ("pytorch_optimizer.SAM", INSIDE, "first_step(), second_step()"),
    ("pytorch_optimizer.SAM", INSIDE, "backward(), step(closure)"),
]


@for_releases
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "made", "stepped"), SAMPLE)
def test_it_trains_as_in_plain_torch(
    name: str, made: str, stepped: str, strategy: str, place: str
) -> None:
    recipe = Recipe(name, dict(classes())[name], made, stepped)
    trial = tried(recipe, strategy, place, compute_devices(2))
    assert trial.outcome is Outcome.EQUAL, f"{trial.outcome.value}: {trial.said}"
