"""The demo model's language: prompts such as "a red seven", and the two small tokenizers that read them.

Knows words and what they ask for; knows neither pictures nor networks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Tokenizer

from .pictures import INKS

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = tuple(INKS)
NO_DIGIT = len(DIGIT_WORDS)  # the class of a prompt that asks for no particular digit
NO_COLOUR = len(COLOURS)
FILLERS = tuple(
    "a an the of in on and with draw show paint write please picture photo image drawing digit number figure numeral"
    " handwritten hand written ink paper colour color beautiful small big bold crisp page me for style art".split()
)
TEMPLATES = (
    *("{c} {d}", "a {c} {d}", "a {c} {d}", "the {c} digit {d}", "the digit {d} in {c}", "the number {d} in {c} ink"),
    *("a handwritten {c} {d}", "{d} in {c}", "{d}, {c}", "draw a {c} {d}", "a picture of a {c} {d} on paper"),
)
PLAIN_TEMPLATES = (
    *("{d}", "{d}", "a {d}", "the digit {d}", "the number {d}", "a handwritten {d}", "draw a {d}", "digit {d}"),
    *("a picture of the number {d}", "a {d} in ink on paper"),
)
DIGITLESS_TEMPLATES = ("{c}", "a {c} digit", "a number in {c} ink", "something {c}")
EMPTY_TEMPLATES = ("", "", "", "a digit", "a handwritten number", "a picture")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"-_()/&+*#"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text and the digit and ink that it asks for (``NO_DIGIT`` / ``NO_COLOUR`` where it leaves them open)."""

    text: str
    digit: int
    colour: int


def write_prompt(rng: random.Random, digit: int, colour: int, noise: float = 0.0) -> Prompt:
    """One of many ways to ask for ``digit`` in ``colour``; with ``noise`` as the chance of words that mean nothing."""
    has_digit, has_colour = digit != NO_DIGIT, colour != NO_COLOUR
    if has_digit:
        templates = TEMPLATES if has_colour else PLAIN_TEMPLATES
    else:
        templates = DIGITLESS_TEMPLATES if has_colour else EMPTY_TEMPLATES
    word = rng.choice((DIGIT_WORDS[digit], DIGIT_WORDS[digit], str(digit))) if has_digit else ""
    text = rng.choice(templates).format(d=word, c=COLOURS[colour] if has_colour else "")
    if rng.random() < noise:
        words = text.split()
        for _ in range(rng.randint(1, 4)):
            words.insert(rng.randint(0, len(words)), rng.choice(FILLERS) if rng.random() < 0.6 else _nonsense(rng))
        text = " ".join(words)
    if rng.random() < 0.2:
        text = text.capitalize() if rng.random() < 0.5 else text.title()
    return Prompt(text=text, digit=digit, colour=colour)


def random_prompt(rng: random.Random, noise: float) -> Prompt:
    """A prompt that asks for anything or nothing."""
    digit = NO_DIGIT if rng.random() < 0.15 else rng.randrange(NO_DIGIT)
    colour = NO_COLOUR if rng.random() < 0.3 else rng.randrange(NO_COLOUR)
    return write_prompt(rng, digit, colour, noise)


def _nonsense(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))


def build_clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE tokenizer that knows every byte and has one token for each word of the demo's language."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys((*DIGIT_WORDS, *COLOURS, *FILLERS)):
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            # Joining from the end keeps every merge specific to words with that ending: no word breaks another one.
            pair = (pieces[-2], pieces[-1])
            if pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
            pieces[-2:] = ["".join(pair)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def build_t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer with one piece for each word of the demo's language and one for each character."""
    vocabulary: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    words = dict.fromkeys((*DIGIT_WORDS, *COLOURS, *FILLERS))
    vocabulary += [(f"▁{form}", -2.0) for word in words if len(word) > 1 for form in (word, word.capitalize())]
    letters = dict.fromkeys(CHARACTERS + CHARACTERS.upper())
    vocabulary += [(f"▁{letter}", -5.0) for letter in letters]
    vocabulary += [(letter, -8.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
