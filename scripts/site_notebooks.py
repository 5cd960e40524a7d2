"""A hook for mkdocs: run the notebooks of docs/ and show them, with their output, as pages of the site.

`docs/diagnose.ipynb` becomes the page `diagnose-notebook.md`. It exists in the site only, so it is never outdated. The
last hook also writes `llms.txt`, which lists the pages for language models.
"""

import ast
import contextlib
import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ENDING = "-notebook.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for notebook in sorted(Path(config.docs_dir).glob("*.ipynb")):
        files.append(File.generated(config, notebook.stem + ENDING, content=rendered(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to notebooks lead to their pages."""
    return markdown.replace(".ipynb)", f"{ENDING})")


def rendered(notebook: Path) -> str:
    """Return a notebook in Markdown, each cell with the value of its last line."""
    names: dict[str, object] = {}
    parts = []
    with contextlib.chdir(notebook.parent):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                text = f"```python\n{text}\n```\n\n{_value(text, names)}"
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _value(code: str, names: dict[str, object]) -> str:
    """Run a cell, and show the value of its last line if that is an expression."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    table = getattr(value, "_repr_html_", None)
    return table().replace(' border="1" class="dataframe"', "") if table is not None else f"```text\n{value}\n```"


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Remember the pages in their order."""
    config.extra["pages"] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt."""
    pages = config.extra["pages"]
    lines = [f"- [{page.title}]({page.url})" for page in pages]
    text = "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", *lines, ""])
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")
