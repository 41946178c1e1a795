"""The first layer from which on an engine is wrong, found by halving.

Owns: the search. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator


def first_wrong(count: int, agrees: Callable[[int], bool | None]) -> int | None:
    """The number of the first of `count` layers at which a network that ends there is wrong.

    `agrees(k)`: whether the network up to layer k, that one included, is right; None where that cannot be told (the
    engine does not take such a network). Once wrong, it is taken to stay wrong. The last layer is taken to be wrong.
    Asks about log2(count) times. None for no layers.
    """
    if not count:
        return None
    right, wrong = -1, count - 1
    while wrong - right > 1:
        for middle in _from_the_middle(right + 1, wrong - 1):
            answer = agrees(middle)
            if answer is not None:
                right, wrong = (middle, wrong) if answer else (right, middle)
                break
        else:
            break  # Nothing between the two can be told.
    return wrong


def _from_the_middle(first: int, last: int) -> Iterator[int]:
    """The middle, then its neighbours, ever further away."""
    middle = (first + last) // 2
    yield middle
    for distance in range(1, last - first + 1):
        for place in (middle - distance, middle + distance):
            if first <= place <= last:
                yield place
