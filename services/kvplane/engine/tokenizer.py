"""A reversible tokenizer: bytes, a few special tokens, and 6400 four-letter words.

A word token is a space and consonant, vowel, consonant, vowel (`` bako``). Its text is
always five characters beginning with a space, so text made of generated tokens splits
back into those tokens, whatever stands before or behind it: histories that only append
text only append ids.
"""

import re
from collections.abc import Iterable, Sequence

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
FIRST_WORD = FIRST_SPECIAL + len(SPECIALS)
NUM_WORDS = len(SYLLABLES) ** 2
VOCAB_SIZE = FIRST_WORD + NUM_WORDS

_SPECIAL_IDS = {text: FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
_SYLLABLE_IDS = {text: i for i, text in enumerate(SYLLABLES)}
_SYLLABLE = f"[{CONSONANTS}][{VOWELS}]"
_PIECE = re.compile("|".join([*(re.escape(s) for s in SPECIALS), f" {_SYLLABLE * 2}"]))


def encode(text: str) -> list[int]:
    """Return the token ids of any text."""
    ids: list[int] = []
    done = 0
    for match in _PIECE.finditer(text):
        ids.extend(text[done : match.start()].encode("utf-8", "surrogatepass"))
        piece = match.group()
        special = _SPECIAL_IDS.get(piece)
        ids.append(word_id(piece) if special is None else special)
        done = match.end()
    ids.extend(text[done:].encode("utf-8", "surrogatepass"))
    return ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(token_bytes(token) for token in ids).decode("utf-8", "replace")


def token_strings(ids: Sequence[int]) -> list[str]:
    """Return the text of each token by itself."""
    return [decode((token,)) for token in ids]


def token_bytes(token: int) -> bytes:
    """Return the bytes of one token. ValueError for an id outside the vocabulary."""
    if 0 <= token < FIRST_SPECIAL:
        return bytes((token,))
    if FIRST_SPECIAL <= token < FIRST_WORD:
        return SPECIALS[token - FIRST_SPECIAL].encode()
    if FIRST_WORD <= token < VOCAB_SIZE:
        first, second = divmod(token - FIRST_WORD, len(SYLLABLES))
        return f" {SYLLABLES[first]}{SYLLABLES[second]}".encode()
    raise ValueError(f"{token} is not a token id: use 0 to {VOCAB_SIZE - 1}")


def word_id(piece: str) -> int:
    """Return the id of a word piece such as `` bako``."""
    return FIRST_WORD + _SYLLABLE_IDS[piece[1:3]] * len(SYLLABLES) + _SYLLABLE_IDS[piece[3:5]]
