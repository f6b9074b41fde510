"""Sections cut into pieces: whole sentences, some 25-220 tokens, each a document of its own."""

import random
import re

from bench.nano.sources import Section

SHORTEST, LONGEST = 100, 700
"""Characters a piece aims at: the target is drawn between them, once a piece."""

LIMIT = 950
"""Characters above which a piece that found no end is dropped."""

_ABBREVIATION = re.compile(r"\b(Mr|Mrs|Dr|St|Messrs|Esq|Capt|Col|Gen|No|[A-Z])\.$")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z0-9])")


def sentences(text: str) -> list[str]:
    """Sentences of one paragraph; an abbreviation does not end one."""
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        head = text[start : match.end()].rstrip()
        if not _ABBREVIATION.search(head):
            parts.append(head)
            start = match.end()
    return [*parts, text[start:]] if start < len(text) else parts


def pieces(section: Section, rng: random.Random) -> list[str]:
    """The section as pieces that begin and end with whole sentences.

    Paragraphs of a novel stay apart; verses run on; each speech of a play has its own line.
    """
    joiner = {"novel": "\n\n", "verse": " ", "speech": " ", "play": "\n"}[section.kind]
    out: list[str] = []
    units: list[str] = []
    target = rng.randint(SHORTEST, LONGEST)
    for unit, opens_paragraph in _units(section):
        glue = joiner if opens_paragraph else " "
        units.append(unit if not units else glue + unit)
        text = "".join(units)
        if len(text) >= target and _ends_sentence(text):
            out.append(text)
            units, target = [], rng.randint(SHORTEST, LONGEST)
    rest = "".join(units)
    if rest and len(rest) >= SHORTEST // 2 and _ends_sentence(rest):
        out.append(rest)
    return [p for p in out if len(p) <= LIMIT]


def _units(section: Section) -> list[tuple[str, bool]]:
    """(text, whether it opens a paragraph): sentences of prose, whole verses and speeches."""
    if section.kind in ("verse", "play"):
        return [(p, True) for p in section.paragraphs]
    return [(s, i == 0) for p in section.paragraphs for i, s in enumerate(sentences(p))]


def _ends_sentence(text: str) -> bool:
    return text.rstrip("\"')")[-1:] in (".", "!", "?") and text.count('"') % 2 == 0
