"""A hook of mkdocs: a file outside docs/ that a page links to, such as a figure of results/, is part of the site.

Pages link to it by its path from docs/, which GitHub follows too. The site takes the file from where it lies when it is
built, so that no copy can grow old.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
"""The target of a link that leaves docs/, whose pages lie side by side."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files. One that is missing stays a broken link, which ends a strict build."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for name in OUTSIDE.findall(page.content_string):
            if (root / name).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links at the files' places in the site."""
    return OUTSIDE.sub(r"\1", markdown)
