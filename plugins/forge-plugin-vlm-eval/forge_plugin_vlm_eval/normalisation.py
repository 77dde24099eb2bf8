"""Answers before they are compared: as VQA's evaluation server does (Antol et al. 2015; Goyal et al. 2017)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

Normalisation = Literal["none", "case", "vqa"]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(DIGITS)}}
ARTICLES = {"a", "an", "the"}
SIGNS = ';/[]"{}()=+\\_-><@`,?!'
# As VQA's script (vqaEval.py) has it: its look-behind for digits has a typo, and excludes nothing
PERIOD = re.compile(r"\.(?!\d)")
THOUSANDS = re.compile(r"(?<=\d),+(?=\d)")
CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd "
    "somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've "
    "something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't "
    "we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll "
    "who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've "
    "you'll you're you've "
)


def normaliser(name: Normalisation) -> Callable[[str], str]:
    """Returns the function that normalises an answer before it is compared.

    none: the answer as it is. case: lower case, with single spaces and none around it. vqa: see `vqa`.
    """
    functions: Mapping[str, Callable[[str], str]] = {
        "none": str,
        "case": lambda text: " ".join(text.lower().split()),
        "vqa": vqa,
    }
    return functions[name]


def vqa(text: str) -> str:
    r"""Returns an answer as VQA compares it, step by step.

    Line breaks and tabs become spaces. Each of ``; / [ ] " { } ( ) = + \ _ - > < @ ` , ? !`` is removed if it stands
    beside a space, or the answer has a comma between digits, and becomes a space otherwise; periods are removed unless
    a digit follows. Then, word by word in lower case: zero to ten and none become digits, the articles a, an and the
    go, and contractions get their apostrophes.
    """
    text = text.replace("\n", " ").replace("\t", " ").strip()
    bare, has_thousands = text, THOUSANDS.search(text) is not None
    for sign in SIGNS:
        # Looked for in the text before any replacement, as VQA's script does
        beside_space = f"{sign} " in text or f" {sign}" in text
        bare = bare.replace(sign, "" if beside_space or has_thousands else " ")
    words = (NUMBERS.get(word, word) for word in PERIOD.sub("", bare).lower().split())
    return " ".join(APOSTROPHES.get(word, word) for word in words if word not in ARTICLES)


def _without_an_apostrophe(words: str) -> Iterator[tuple[str, str]]:
    """Yields each contraction with one of its apostrophes left out, and the contraction."""
    for word in words.split():
        for place in (place for place, letter in enumerate(word) if letter == "'"):
            yield word[:place] + word[place + 1 :], word


APOSTROPHES: Mapping[str, str] = dict(_without_an_apostrophe(CONTRACTIONS))


def vqa_accuracy(said: str, right: list[str]) -> float:
    """Returns VQA's accuracy of a normalised answer among normalised answers of several people.

    It is min(matches / 3, 1) among all but one of them, on average over the one that is left out.
    """
    matches, people = right.count(said), len(right)
    # In `matches` of the cases a matching answer is left out, and one match fewer is counted
    without_a_match = matches * min((matches - 1) / 3, 1.0)
    return (without_a_match + (people - matches) * min(matches / 3, 1.0)) / people
