"""The table as a command: `python tests/published_optimizers --help`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

# As it is in tests, which use the same modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_optimizers.recipes import classes, recipes
from published_optimizers.trials import PLACES, STRATEGIES, Outcome, tried
from torchstrategy.testing import simulate_devices


def main() -> int:
    """Prints the table; 0 if every trial is equal to plain PyTorch."""
    options = _options()
    torch.set_num_threads(1)
    devices = (
        list(simulate_devices(5)[:2]) if options.simulate_devices else ["cpu", "cpu"]
    )
    names = [
        name
        for name, _ in classes()
        if options.only is None or name.partition(".")[2] in options.only
    ]
    chosen = recipes(names, options.closures)
    trials = [
        tried(recipe, strategy, place, devices)
        for recipe in chosen
        for strategy in STRATEGIES
        for place in PLACES
    ]
    for trial in trials:
        if trial.outcome is not Outcome.EQUAL:
            print(
                f"  {trial.recipe}, {trial.strategy}, {trial.place}: "
                f"{trial.outcome.value}: {trial.said}"
            )
    made = Counter((recipe.made, recipe.stepped) for recipe in chosen)
    for (how, stepped), count in made.items():
        print(f"{count} classes: {how}, {stepped}")
    trained = {recipe.name for recipe in chosen}
    print(
        "no way to train plainly:",
        ", ".join(name for name in names if name not in trained) or "none",
    )
    counts = Counter(trial.outcome for trial in trials)
    print(
        f"{len(trials)} trials:",
        ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome),
    )
    return int(counts[Outcome.EQUAL] < len(trials))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/published_optimizers", description=__doc__
    )
    parser.add_argument(
        "--simulate-devices",
        action="store_true",
        help="replicas with memory of their own",
    )
    parser.add_argument(
        "--closures",
        action="store_true",
        help="and every other way in which each can take a step",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        help="names of classes, with commas",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
