"""A hook for mkdocs: files outside docs/ that a page links to, such as figures of results/, become part of the site.

Pages link to them by the path from docs/, which works on GitHub as well. The site copies the file when it is built, so
no copy gets outdated. The theme's search field, a dialog, gets a name for screen readers.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
"""Target of a link that leaves docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files. A missing file stays a broken link, which ends a strict build."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for name in OUTSIDE.findall(page.content_string):
            if (root / name).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links to the files' places in the site."""
    return OUTSIDE.sub(r"\1", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the dialog of the search."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
