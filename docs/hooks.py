"""What MkDocs has to be told about these pages: they link to files outside docs/, as one reads them in the repository.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site. Any other file that a page links to is copied to
source/, so that the link works there too. A link to a file that does not exist stays as it is, and MkDocs fails at it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()[^)\s#]+")


def on_files(files, config):
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for uri in filter(None, (_place(page.src_uri, link) for link in LINK.findall(page.content_string))):
            if uri.startswith("source/") and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri.removeprefix("source/"))))
    return files


def on_page_markdown(markdown, page, config, files):
    here = posixpath.dirname(page.file.src_uri)

    def from_here(link):
        uri = _place(page.file.src_uri, link[0])
        return posixpath.relpath(uri, here or ".") if uri else link[0]

    return LINK.sub(from_here, markdown)


def on_page_content(html, page, config, files):
    return html.replace("::</p>", ":</p>")  # docstrings announce code as reStructuredText does


def _place(page: str, link: str) -> str | None:
    """Where on the site a link of a page leads; None for what is no file of the repository."""
    places = {uri: path for path, uri in PAGES.items()}
    path = posixpath.normpath(posixpath.join(posixpath.dirname(places.get(page, f"docs/{page}")), link))
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if (ROOT / path).is_file() else None
