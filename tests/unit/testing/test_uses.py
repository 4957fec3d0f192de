"""The last use of each part of a storage: as if each byte had one of its own."""

from __future__ import annotations

import math
import random

import pytest

from torchstrategy.testing._simulation.uses import Span, Uses

BYTES = 24


def some_span(chance: random.Random) -> Span:
    begin = chance.randrange(BYTES)
    return chance.choice(
        [
            Span(begin, chance.randint(begin, BYTES)),
            Span(begin, math.inf),
            Span(0, math.inf),
        ]
    )


def bytes_of(span: Span) -> range:
    return range(span.begin, BYTES if math.isinf(span.end) else int(span.end))


@pytest.mark.parametrize("seed", range(200))
def test_each_byte_has_the_use_that_was_put_there_last(seed: int) -> None:
    chance = random.Random(seed)
    uses: Uses[int] = Uses()
    expected: dict[int, int] = {}
    for number in range(30):
        span = some_span(chance)
        if chance.random() < 0.2:
            uses.forget(span)
            for byte in bytes_of(span):
                expected.pop(byte, None)
        else:
            uses.put(span, number)
            expected.update(dict.fromkeys(bytes_of(span), number))
        begin = chance.randrange(BYTES)
        asked = Span(begin, chance.randint(begin, BYTES))
        found = uses.within(asked)
        # A use with another one in its middle counts for each of its parts.
        assert set(found) == {
            expected[byte] for byte in bytes_of(asked) if byte in expected
        }, (asked, expected)
        assert set(uses.within(Span(0, BYTES))) == set(expected.values())
