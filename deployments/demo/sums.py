"""The texts of the demo's language model: sums as words. `47+85=` must become `47 plus 85 is 132.`

Most letters follow from the previous one, copied digits need a look back, and the digits of the sum a computation. So
tokens need different depths, and a text is either right or wrong.
"""

from itertools import product

import numpy as np

LARGEST = 99  # the largest number in a sum
# The share of sums that no weight is trained on. Ramps are made from the second half of them.
HELD_OUT = 0.1
CHARACTERS = "0123456789+= .plusi"  # every character of prompts and answers; each is a token
# Tokens beside the characters.
END = "<end>"
UNKNOWN = "<unknown>"


def prompt_of(first: int, second: int) -> str:
    """
    >>> prompt_of(47, 85), answer_to(47, 85)
    ('47+85=', '47 plus 85 is 132.')
    """
    return f"{first}+{second}="


def answer_to(first: int, second: int) -> str:
    return f"{first} plus {second} is {first + second}."


def sums(held_out: bool) -> list[tuple[int, int]]:
    """The pairs of numbers, shuffled in a fixed order."""
    pairs = list(product(range(LARGEST + 1), repeat=2))
    order = np.random.default_rng(0).permutation(len(pairs))
    cut = round(HELD_OUT * len(pairs))
    return [pairs[place] for place in (order[:cut] if held_out else order[cut:])]
