"""docs/house.svg shows the imports that there are."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from house.picture import PICTURE, REFRESH, drawn, drawn_arrows, floors, imports

pytestmark = pytest.mark.slow


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == drawn(), f"run {REFRESH}"


def test_the_picture_is_well_formed_and_names_every_room() -> None:
    picture = ElementTree.fromstring(drawn())
    texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert texts >= {room.name for floor in floors() for room in floor}


def test_every_arrow_goes_down() -> None:
    floor_of = {
        room.name: number for number, floor in enumerate(floors()) for room in floor
    }
    assert all(floor_of[end] < floor_of[start] for start, end in imports())


def test_what_is_not_drawn_is_where_other_arrows_lead() -> None:
    counts = imports()
    leads = set(drawn_arrows(counts, [room.name for room in floors()[0]]))
    while further := {(a, d) for a, b in leads for c, d in leads if b == c} - leads:
        leads |= further
    assert leads >= counts.keys()
