"""What the demo's decoder writes: sums, said in words. `47+85=` is to become `47 plus 85 is 132.`

Most letters follow from the one before, copied digits need a look back, and the digits of the sum must be worked out:
so tokens differ in how deep they have to go, and exact match is the truth.
"""

from itertools import product

import numpy as np

LARGEST = 99
HELD_OUT = 0.1  # of all sums: no weight was learned from them, and nothing at all from the first half of them
CHARACTERS = "0123456789+= .plusi"
END, UNKNOWN = "<end>", "<unknown>"


def prompt_of(first: int, second: int) -> str:
    """
    >>> prompt_of(47, 85), answer_to(47, 85)
    ('47+85=', '47 plus 85 is 132.')
    """
    return f"{first}+{second}="


def answer_to(first: int, second: int) -> str:
    return f"{first} plus {second} is {first + second}."


def sums(held_out: bool) -> list[tuple[int, int]]:
    """The pairs of numbers, in a fixed order without order."""
    pairs = list(product(range(LARGEST + 1), repeat=2))
    order = np.random.default_rng(0).permutation(len(pairs))
    cut = round(HELD_OUT * len(pairs))
    return [pairs[place] for place in (order[:cut] if held_out else order[cut:])]
