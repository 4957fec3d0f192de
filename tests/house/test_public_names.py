"""No public name, parameter or default changes unnoticed."""

from __future__ import annotations

from house import public_names


def test_the_public_names_are_those_of_the_list() -> None:
    found, known = (
        set(public_names.lines()),
        set(public_names.LIST.read_text().splitlines()),
    )
    gone, new = sorted(known - found), sorted(found - known)
    assert not gone and not new, (
        f"gone: {gone}; new: {new}. If that is meant: python tests/house/public_names.py"
    )
