"""Pieces as conversations in Gemma's turn format, each model turn ending in `<turn|>`."""

import random
import re

from bench.nano.pieces import sentences
from bench.nano.sources import Section

SYSTEM_SHARE = 0.1
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "Answer with a short passage.",
    "Write in whole sentences.",
)
_STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Tell me about {}.",
    "Write a short story about {}.",
    "Can you tell me something about {}?",
    "I would like to hear about {}.",
)
_SPEECH_REQUESTS = (
    "What did President {work} tell Congress in {place}?",
    "What did {work} say about {topic}?",
    "Write a speech about {topic}.",
    "Tell me about {topic}.",
)
_CONTINUE_REQUESTS = ("Continue: {}", "Continue this text: {}", "What happens next?\n\n{}")
_VERSE_REQUESTS = ("What does {} say?", "Read {}.", "Quote {}.", "{}")
_COMMON = frozenset(
    "mrs miss sir lady lord about after again against almost along also although always among "
    "another because been before being between both cannot could does doing done down each "
    "either enough even ever every first from give given great have having here himself "
    "herself however into itself just know less like little long made make many might more "
    "most much must myself never nothing only other others ought over perhaps quite rather "
    "said same says seem seemed shall should since some something soon still such than that "
    "their them then there therefore these they thing things think this those though thought "
    "through thus till told under until upon very were what when where whether which while "
    "whole whom whose will with within without would your yourself year years last good well "
    "come came went part present present time times".split()
)


def turn(role: str, content: str) -> str:
    """One turn of the chat format."""
    return f"<|turn>{role}\n{content}<turn|>\n"


def conversation(exchanges: list[tuple[str, str]], rng: random.Random) -> str:
    """Exchanges of (user, model) text as one document, sometimes with a system turn."""
    system = turn("system", rng.choice(SYSTEM_TEXTS)) if rng.random() < SYSTEM_SHARE else ""
    turns = [turn("user", user) + turn("model", model) for user, model in exchanges]
    return "<bos>" + system + "".join(turns).removesuffix("\n")


def exchange(section: Section, piece: str, rng: random.Random) -> tuple[str, str] | None:
    """A request that `piece` answers, and the answer; None when the piece gives none."""
    if section.kind == "play":
        return _who_says(section, piece, rng)
    if rng.random() < 0.5:
        return _continue(piece, rng)
    topic = _topic(piece, rng)
    if topic is None:
        return None
    if section.kind == "speech":
        request = rng.choice(_SPEECH_REQUESTS)
        return request.format(work=section.work, place=section.place, topic=topic), piece
    return rng.choice(_STORY_REQUESTS).format(topic), piece


def verse_exchange(section: Section, rng: random.Random) -> tuple[str, str]:
    """A look-up of one to three verses of a Bible chapter."""
    first = rng.randrange(len(section.paragraphs))
    last = min(first + rng.randrange(3), len(section.paragraphs) - 1)
    place = f"{section.work} {section.place}:{first + 1}" + (f"-{last + 1}" if last > first else "")
    text = " ".join(section.paragraphs[first : last + 1])
    return rng.choice(_VERSE_REQUESTS).format(place), text


def _continue(piece: str, rng: random.Random) -> tuple[str, str] | None:
    paragraphs = piece.split("\n\n")
    if len(paragraphs) > 1 and rng.random() < 0.5:
        cut = rng.randrange(1, len(paragraphs))
        head, tail = "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])
    else:
        opening = sentences(paragraphs[0])
        if len(opening) < 2:
            return None
        head = " ".join(opening[: rng.randint(1, min(3, len(opening) - 1))])
        tail = piece[len(head) :].strip()
    return rng.choice(_CONTINUE_REQUESTS).format(head), tail


def _who_says(section: Section, piece: str, rng: random.Random) -> tuple[str, str] | None:
    name, _, words = rng.choice(piece.split("\n")).partition(": ")
    opening = sentences(words)[0] if words else ""
    if not 15 <= len(opening) <= 300:
        return None
    return f'Who says "{opening}"?', f"{name} says this in {section.work}."


def _topic(piece: str, rng: random.Random) -> str | None:
    """A name in the piece, else a longer word that comes back in it."""
    words = re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]+)?", piece)
    names = [w for w in words if w.split()[0].lower() not in _COMMON]
    if names and rng.random() < 0.6:
        return rng.choice(names)
    lower = re.findall(r"\b(?:the|a|an|his|her|their|our) ([a-z]{4,})\b", piece)
    nouns = sorted({w for w in lower if w not in _COMMON})
    return f"the {rng.choice(nouns)}" if nouns else None
