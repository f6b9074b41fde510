"""Nano's training text: documents from the sources, split into training and validation.

    python -m bench.nano.corpus            # fetches archives, writes .carry/nano/*.jsonl

A document is `<bos>text<eos>`, or a conversation in turn format that ends in `<turn|>`.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from bench.nano.pieces import pieces
from bench.nano.sources import Section, read_sections
from bench.nano.turns import conversation, exchange, verse_exchange

FOLDER = Path(".carry/nano")
SEED = 4
VALIDATION_SHARE = 0.012
PASSES = {"novel": 2, "verse": 2, "speech": 1, "play": 1}
"""How often a section is cut, each time at other places: narrative prose counts double."""

TURN_SHARE = {"novel": 0.28, "verse": 0.22, "speech": 0.12, "play": 0.3}
"""Share of the pieces that are asked for in turn format instead of standing alone."""

ONCE_SHARE = 0.15
"""Share of the narrative pieces with such an opening that get "Once upon a time" before it."""

_OPENERS = frozenset("The A An He She It They There When In At On One As This That".split())


@dataclasses.dataclass(frozen=True)
class Document:
    """One training text with its special tokens, and where it came from."""

    text: str
    kind: str
    is_turns: bool


def is_validation(section: Section) -> bool:
    """Whether a section is held out: decided by its name, so that no seed moves it."""
    digest = hashlib.sha256(f"{section.work}/{section.place}".encode()).digest()
    return int.from_bytes(digest[:4]) < VALIDATION_SHARE * 2**32


def documents(sections: list[Section], rng: random.Random) -> Iterator[Document]:
    """All documents of the sections, in order."""
    for section in sections:
        for _ in range(PASSES[section.kind]):
            yield from _section_documents(section, rng)
        if section.kind == "verse":
            looked_up = [verse_exchange(section, rng) for _ in range(rng.randint(2, 4))]
            yield Document(conversation(looked_up, rng), section.kind, True)


def _section_documents(section: Section, rng: random.Random) -> Iterator[Document]:
    asked: list[tuple[str, str]] = []
    for piece in pieces(section, rng):
        if _is_table(piece):
            continue
        turns = exchange(section, piece, rng) if rng.random() < TURN_SHARE[section.kind] else None
        if turns is None:
            yield Document(f"<bos>{_opening(section, piece, rng)}<eos>", section.kind, False)
            continue
        asked.append(turns)
        short = sum(len(text) for pair in asked for text in pair) < 500
        if not (short and rng.random() < 0.7):
            yield Document(conversation(asked, rng), section.kind, True)
            asked = []
    if asked:
        yield Document(conversation(asked, rng), section.kind, True)


def _is_table(piece: str) -> bool:
    """Whether figures fill the piece, as in the financial parts of the older addresses."""
    return sum(c.isdigit() for c in piece) > 0.015 * len(piece)


def _opening(section: Section, piece: str, rng: random.Random) -> str:
    """The piece; a share of the narrative ones opens with "Once upon a time"."""
    word = piece.split(" ", 1)[0]
    if section.kind in ("novel", "verse") and word in _OPENERS and rng.random() < ONCE_SHARE:
        return f"Once upon a time, {piece[0].lower()}{piece[1:]}"
    return piece


def build(folder: Path, seed: int = SEED) -> dict[str, list[Document]]:
    """The "train" and "valid" documents, shuffled with `seed`; archives go to `folder`/sources."""
    sections = read_sections(folder / "sources")
    rng = random.Random(seed)
    splits = {
        "train": list(documents([s for s in sections if not is_validation(s)], rng)),
        "valid": list(documents([s for s in sections if is_validation(s)], rng)),
    }
    for split in splits.values():
        rng.shuffle(split)
    return splits


def main() -> None:
    """Write both splits as JSON lines and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, split in build(folder).items():
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(dataclasses.asdict(d)) + "\n" for d in split)
        sizes: collections.Counter[str] = collections.Counter()
        for document in split:
            sizes[document.kind + (" turns" if document.is_turns else "")] += len(document.text)
        print(name, len(split), "documents", sum(sizes.values()), "characters", dict(sizes))


if __name__ == "__main__":
    main()
