"""What the site of the documentation has beyond the Markdown files: the navigation, the functions of the ops, and the
comparison page of the quickstart."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OPS, COMPARISON = "docs/ops_functions.md", "docs/comparison.md"
_PAGE = ROOT / "runs" / "quickstart.html"


def navigation() -> list[Any]:
    """The sections and pages of docs/README.md."""
    sections: list[Any] = ["README.md", "docs/README.md"]
    text = (ROOT / "docs" / "README.md").read_text()
    for heading, pages in re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|\Z)", text, re.DOTALL | re.MULTILINE):
        found = [posixpath.normpath(f"docs/{page}") for page in re.findall(r"\]\(([^)#:]+\.md)\)", pages)]
        found[-1:-1] = [OPS] if "docs/ops.md" in found else []
        sections.append({heading: found})
    sections[2]["To use it"].insert(1, COMPARISON)
    return [*sections, {"Changes": "CHANGELOG.md"}]


def functions() -> str:
    """A page of the docstrings of the functions that docs/ops.md imports."""
    text = (ROOT / "docs" / "ops.md").read_text()
    imports = re.findall(r"^from lineargpt_ops\.(\w+) import (.+)$", text, re.MULTILINE)
    names = sorted(f"kernels.{module}.{name.strip()}" for module, names in imports for name in names.split(","))
    return "\n\n".join(["# Functions of the ops", "What they share, and examples: [ops.md](ops.md).",
                        *(f"::: {name}" for name in names)])


def comparison() -> str:
    """The page with the comparison of the quickstart, or with its picture."""
    page = ('<iframe src="../quickstart.html" title="comparison page" style="width: 100%; height: 80vh; border: 0">'
            "</iframe>\n\nAlone: [quickstart.html](quickstart.html)." if _PAGE.is_file() else
            "![val loss against training time](quickstart.png)\n\nThe page itself is in the site if `make quickstart` "
            "ran before `make docs`.")
    return ("# A comparison page\n\n`compare.py` writes the curves, figures and configs of runs to one file. This one "
            "has the runs of `make quickstart`: softmax, chunked and gated attention, two minutes each.\n\n" + page)


def on_config(config: Any) -> Any:
    config.nav = navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, content in {OPS: functions(), COMPARISON: comparison()}.items():
        files.append(File.generated(config, name, content=content))
    if _PAGE.is_file():
        files.append(File.generated(config, "docs/quickstart.html", abs_src_path=str(_PAGE)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to what the site does not have, such as code and folders, lead to the repository. Without its address,
    those to folders lead to the README in it, and others are plain text."""
    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target))
        is_folder = (ROOT / path).is_dir()
        known = (file := files.get_file_from_path(path)) is not None and file.inclusion.is_included()
        if config.repo_url and (ROOT / path).exists() and (not known or path.endswith(".ipynb")):
            return f"[{text}]({config.repo_url.rstrip('/')}/{'tree' if is_folder else 'blob'}/main/{path}{anchor})"
        if is_folder and files.get_file_from_path(f"{path}/README.md"):
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return text if not known and (ROOT / path).exists() else found[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)", link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Removes the roles of Sphinx before names in docstrings."""
    return re.sub(r":(?:func|class|mod|data|meth|attr):(?=<code>)", "", html)
