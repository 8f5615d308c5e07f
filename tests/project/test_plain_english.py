"""Words that make a sentence hard to read become fewer; commit subjects fit in a line."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.file_index import ABOVE

ROOT = Path(__file__).parents[2]
HARD = re.compile(r"\b(told|holds?|those|who|stands?|so many|go(?:es)? with|tells? of)\b", re.I)
"""Verbs with six senses, and words in the place of a noun of the trade."""
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    - {ROOT / "CHANGELOG.md", ROOT / "docs" / "lab-notes.md"}
)
OPENING = re.compile(
    r"(?:^(?:# )?(?:- |\d\. )?|(?<=[.:] ))(?:Of|By|With|Where|Without|What|Who)\b[^.:?]*[.:]", re.M
)
"""Words that begin a sentence before its noun and verb; a question may."""
A_PAGE, ALL_PAGES, MESSAGES = 1, 1, 0
"""The most of them in a page, in all pages, and in what the code prints: these may only fall."""
WORDS = 39_893
"""The most words of README.md and docs/*.md, as `wc -w` counts them: they may only become fewer."""
SINCE = "2db2961a"
"""The commit after which subjects are checked."""


def test_pages_use_fewer_of_them() -> None:
    found = Counter(
        {
            str(page.relative_to(ROOT)): len(HARD.findall(FENCE.sub("", page.read_text("utf-8"))))
            for page in (*PAGES, *(ROOT / "notebooks").glob("*.py"))
        }
    )
    assert max(found.values()) <= A_PAGE, found.most_common(3)
    assert found.total() <= ALL_PAGES, found.most_common(10)


def test_sentences_of_pages_begin_with_a_noun() -> None:
    """A noun of the trade does the verb; questions are free."""
    assert OPENING.findall("It runs. With two it\nwaits: Of these. What is it? Where") == [
        "With two it\nwaits:",
        "Of these.",
    ]
    pages = (*PAGES, *(ROOT / "notebooks").glob("*.py"))
    found = [OPENING.findall(FENCE.sub("", page.read_text("utf-8"))) for page in pages]
    assert [one for sentences in found for one in sentences] == []


def test_pages_become_shorter() -> None:
    found = Counter(
        {
            str(page.relative_to(ROOT)): len(page.read_text("utf-8").split())
            for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        }
    )
    assert found.total() <= WORDS, found.most_common(5)


def messages(text: str) -> list[str]:
    """Return the texts of more than a word in a file, docstrings left out: a word is a key."""
    tree = ast.parse(text)
    said = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in said
        and " " in node.value
    ]


def test_messages_use_fewer_of_them() -> None:
    paths = (path for name in ("simulator", *ABOVE) for path in (ROOT / name).rglob("*.py"))
    found = Counter(
        {
            str(path.relative_to(ROOT)): sum(
                len(HARD.findall(text)) for text in messages(path.read_text("utf-8"))
            )
            for path in paths
        }
    )
    assert found.total() <= MESSAGES, found.most_common(10)


def test_what_counts_as_a_message() -> None:
    code = '"""Who."""\nx = f"held by {y} of those"\n"who"\nz = "holds"\n'
    assert messages(code) == ["held by ", " of those"]


def test_subjects_of_commits_fit_in_a_line() -> None:
    """A verb first, one change, at most 72 characters; CONTRIBUTING.md has the rule."""
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", f"{SINCE}.."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if log.returncode:
        pytest.skip("there is no history of this checkout back to the commit after which it counts")
    subjects = log.stdout.splitlines()
    assert [one for one in subjects if len(one) > 72 or not re.match(r"[A-Z]\w+ \S", one)] == []
