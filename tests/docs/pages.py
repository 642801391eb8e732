"""The pages of the documentation: their prose and their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)(`{3,}|:{3,})(.*)$")


def pages() -> list[Path]:
    """All pages that people write, the README among them."""
    inside = [
        path
        for path in sorted(DOCS.rglob("*.md"))
        if not path.relative_to(DOCS).parts[0].startswith("_")
    ]
    return [*sorted(ROOT.glob("*.md")), *inside]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A block of code."""

    line: int
    language: str
    text: str


def _split(text: str) -> tuple[list[str], list[Block]]:
    """The lines outside of fences, and the blocks within them."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence, language, begin = "", "", 0
    kept: list[str] = []
    for i, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence:
            if found and found[2] == fence and not found[3].strip():
                blocks.append(Block(begin, language, "\n".join(kept) + "\n"))
                fence = ""
            else:
                kept.append(line)
        elif found:
            fence, language, begin, kept = found[2], found[3].strip(), i, []
        else:
            prose.append(line)
    assert not fence, f"the block of line {begin} does not end"
    return prose, blocks


def blocks(path: Path, language: str) -> list[Block]:
    """Those of a language."""
    every = _split(path.read_text(encoding="utf-8"))[1]
    return [block for block in every if block.language == language]


def words(path: Path) -> int:
    """How many a page has, tables included, code left out."""
    prose, _ = _split(path.read_text(encoding="utf-8"))
    return len(re.findall(r"\w[\w'’-]*", _plain("\n".join(prose))))


def _plain(text: str) -> str:
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", " formula ", text, flags=re.DOTALL)
    text = re.sub(r"\$[^$\n]+\$", "formula", text)
    text = re.sub(r"\{\w+\}`[^`]*`", "name", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>", " ", text)


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Paragraphs and items of lists; headings and tables are left out."""
    kept: list[str] = []
    for line in [*lines, ""]:
        bare = line.strip()
        begins = re.match(r"([-*]|\d+\.|:) +", bare)
        if not bare or begins or bare[0] in "#|":
            if kept:
                yield " ".join(kept)
            kept = []
            if not bare or bare[0] in "#|":
                continue
            bare = bare[begins.end() :] if begins else bare
        kept.append(bare)


def sentences(path: Path) -> list[str]:
    """Those of a page's prose."""
    prose, _ = _split(path.read_text(encoding="utf-8"))
    out: list[str] = []
    text = re.sub(r"<!--.*?-->", "", "\n".join(prose), flags=re.DOTALL)
    for paragraph in _paragraphs(text.splitlines()):
        plain = re.sub(r"\b(e\.g|i\.e|et al|vs)\.", r"\1", _plain(paragraph))
        for sentence in re.split(r"(?<=[.!?])[\"”)*]*\s+(?=\S)", plain):
            if re.search(r"\w", sentence):
                out.append(sentence.strip())
    return out
