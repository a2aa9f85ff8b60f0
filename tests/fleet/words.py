"""Text of the engines' own words: a word is a token."""

import random

from kvplane.engine import tokenizer


def word_tokens(rng: random.Random, count: int) -> list[int]:
    """Return so many words, as tokens."""
    return [tokenizer.FIRST_WORD + rng.randrange(tokenizer.NUM_WORDS) for _ in range(count)]


def words(rng: random.Random, count: int) -> str:
    """Return so many words."""
    return tokenizer.decode(word_tokens(rng, count))


def sentence(seed: str, count: int) -> str:
    """Return so many words, others for another seed."""
    return words(random.Random(seed), count)
