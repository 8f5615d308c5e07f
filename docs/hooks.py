"""What the site takes from outside `docs/` (README, changelog, notebooks), and where links lead."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "headway/report/accuracy.csv": "accuracy.csv",
}
"""Pages by their path in the repository, and in the site."""
NOTEBOOKS = sorted(f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb"))
HEADING = re.compile(r"(?m)^# # (.+)$")
"""The first one in a notebook's script is its title."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Add the notebooks to the navigation, all there are."""
    scripts = [(ROOT / name).with_suffix(".py").read_text("utf-8") for name in NOTEBOOKS]
    titles = [match[1] for script in scripts if (match := HEADING.search(script))]
    named = [{title: name} for title, name in zip(titles, NOTEBOOKS, strict=True)]
    config.nav.append({"Notebooks": named})
    return config


@event_priority(100)  # before the plug-in that takes notebooks out of the files
def on_files(files: Files, config: Any) -> Files:
    """Add pages and notebooks from outside `docs/`."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for name in NOTEBOOKS:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site; a link to code becomes the name of its file."""
    here = page.file.src_uri
    source = next((name for name, target in PAGES.items() if target == here), f"docs/{here}")
    folder = posixpath.dirname(source)

    def lead(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PAGES:
            place = PAGES[path]
        elif path in NOTEBOOKS:
            place = path
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return text
        else:
            return match[0]  # the build fails on it
        return f"{mark}[{text}]({place}{anchor or ''})"

    return LINK.sub(lead, markdown)
