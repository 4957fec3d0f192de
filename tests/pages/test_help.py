"""`help(torchstrategy)` and `dir(torchstrategy)` are for users."""

from __future__ import annotations

import torchstrategy


def test_help_begins_with_a_program_and_fits_one_screen() -> None:
    text = torchstrategy.__doc__ or ""
    assert len(text.splitlines()) <= 40
    for word in (
        "MirroredStrategy",
        "strategy.run(train_step",
        "torchrun",
        "torchstrategy.testing",
    ):
        assert word in text
    assert "understudy" not in text and "rooms" not in text


def test_every_name_that_help_says_is_there() -> None:
    text = torchstrategy.__doc__ or ""
    for name in (
        "run",
        "reduce",
        "gather",
        "count_rows",
        "barrier",
        "scope",
        "experimental_local_results",
    ):
        assert f"`{name}`" in text and hasattr(torchstrategy.Strategy, name)


def test_dir_shows_what_users_need() -> None:
    shown = dir(torchstrategy)
    assert {"MirroredStrategy", "testing", "experimental", "nn"} < set(shown)
    assert not [
        name for name in shown if name.startswith("_") and not name.startswith("__")
    ]
    assert "compat" not in shown and torchstrategy.compat.v1 is not None
