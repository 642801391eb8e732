"""tests/lint/wording.py of the tests, and of a test that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint import wording


def test_tests_match_facts() -> None:
    found = [
        (path.relative_to(wording.ROOT).as_posix(), *finding)
        for path in sorted((wording.ROOT / "tests").rglob("*.py"))
        for finding in wording.findings(path)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('with raises(E, match="the disk is full"): f()', "disk full the"),
        ('with raises(E, match="capacity"): f()', None),
        ('with raises(E, match=r"a\\.csv.*broken"): f("broken")', None),
        ('with raises(E, match=f"{x} goes away"): f()', "away goes"),
        ('assert "goes away" in str(e.value)', "away goes"),
        ('assert "goes away" in result.output', None),
    ],
)
def test_wording_is_found(
    tmp_path: Path, body: str, words: str | None
) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(f"def test_a(x, e, result):\n    {body}\n")
    assert [words for _, words in wording.findings(path)] == [words][
        : words is not None
    ]


def test_wording_of_parameters_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(
        '@pytest.mark.parametrize(("n", "text"), [(1, "n is lopsided")])\n'
        "def test_a(n, text):\n"
        "    with raises(E, match=text): f(n)\n"
    )
    assert list(wording.findings(path)) == [(1, "lopsided")]
