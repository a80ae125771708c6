"""What the pages take from the repository when the site is built, so that they cannot drift from it.

    {{ source openk3/model/k3.py K3.hidden }}    a function, a class, an assignment, or the docstring (`__doc__`)
    {{ file openk3/model/k3.py }}                a link to a file, whole, on a page of its own
    {{ rows 54 55 }}                             components of tests/checklist_rows.toml and the tests that prove them
    {{ experiments }}                            the pages of docs/experiments/
    ```math ... ``` and $`...`$                  equations, drawn as SVG by matplotlib; the same marks work on GitHub
    ![...](figures/name.svg)                     figures of docs/figures, put into the page to follow its colours

Each stands on a line of its own but for `file` and the second form of equations. MkDocs calls the `on_*` functions;
everything else needs only Python and matplotlib, so that a page can be checked without MkDocs.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import posixpath
import re
import sys
import textwrap
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.textpath import TextPath

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\{\{ (source|rows|experiments) ?(.*?) \}\}$", re.MULTILINE)
FILE_LINK = re.compile(r"\{\{ file (\S+) \}\}")
MATH_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MATH_INLINE = re.compile(r"\$`([^`]+)`\$")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
CURVES = {1: ("M", 1), 2: ("L", 1), 3: ("Q", 2), 4: ("C", 3), 79: ("Z", 1)}  # a path's codes, and points of each
EM = 10.0  # points of the font that equations are set in; their size on a page is relative to its text


# ---- excerpts


@lru_cache
def text_of(path: str) -> str:
    """A file of the repository. Raises ValueError if it is not there."""
    file = ROOT / path
    if not file.is_file():
        raise ValueError(f"{path} is not in the repository")
    return file.read_text(encoding="utf-8")


def span(path: str, name: str) -> tuple[int, int]:
    """First and last line, from 1, of a definition or assignment in a file. Raises ValueError if there is none."""
    node: Any = ast.parse(text_of(path))
    for part in name.split("."):
        found = [child for child in node.body if part in defined(child)]
        if len(found) != 1:
            raise ValueError(f"{path} has {len(found)} definitions of {name}")
        node = found[0]
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), node.end_lineno


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement gives something to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def excerpt(path: str, name: str) -> tuple[str, int, int]:
    """Code of a definition, and its first and last line."""
    first, last = span(path, name)
    return textwrap.dedent("\n".join(text_of(path).splitlines()[first - 1 : last])), first, last


def source(arguments: str, page: str) -> str:
    path, name = arguments.split()
    if name == "__doc__":
        doc = ast.get_docstring(ast.parse(text_of(path))) or ""
        return f"```text\n{doc}\n```\n{{ .doc }}\n\n{file_link(path, page)}\n{{ .src }}"
    code, first, last = excerpt(path, name)
    where = file_link(path, page, first, f"{path}, lines {first} to {last}")
    return f"```python\n{code}\n```\n\n{where}\n{{ .src }}"


def source_page(path: str) -> str:
    """Name, below docs/, of the page that shows a whole file."""
    return f"source/{path}.md"


def file_link(path: str, page: str, line: int = 0, label: str = "") -> str:
    text_of(path)
    target = posixpath.relpath(source_page(path), posixpath.dirname(page))
    return f"[{label or f'`{path}`'}]({target}{f'#__codelineno-0-{line}' if line else ''})"


# ---- tests


@lru_cache
def coverage() -> Any:
    """tests/coverage_table.py, which reads the markers of the tests."""
    spec = importlib.util.spec_from_file_location("coverage_table", ROOT / "tests/coverage_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@lru_cache
def proofs() -> dict[int, list[tuple[str, str]]]:
    """(file, test) of every row that has one."""
    found: dict[int, list[tuple[str, str]]] = {}
    for proof in coverage().proofs(ROOT / "tests"):
        for row in proof.rows:
            found.setdefault(row, []).append((f"tests/{proof.file}", proof.test))
    return found


@lru_cache
def row_names() -> dict[int, str]:
    rows = tomllib.loads(text_of("tests/checklist_rows.toml"))["rows"]
    return {int(number): name for number, name in rows.items()}


def row_numbers(arguments: str) -> list[int]:
    """ "54 55 60-62" as numbers. Raises ValueError for a row that does not exist."""
    numbers: list[int] = []
    for part in arguments.split():
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    for number in numbers:
        if number not in row_names():
            raise ValueError(f"there is no row {number}")
    return numbers


def rows(arguments: str, page: str) -> str:
    lines = ["| row | component | proved by |", "| --- | --- | --- |"]
    for number in row_numbers(arguments):
        links = [
            file_link(file, page, line_of(file, test), f"{posixpath.basename(file)}::{test}")
            for file, test in proofs().get(number, [])
        ]
        lines.append(f"| {number} | {row_names()[number]} | {'<br>'.join(links) or 'no test yet'} |")
    return "\n".join(lines) + "\n{ .rows }"


def line_of(file: str, test: str) -> int:
    """Line of a test, which may stand in a class."""
    nodes = (node for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, ast.FunctionDef))
    return next(node.lineno for node in nodes if node.name == test)


# ---- experiments


def experiment_pages() -> list[str]:
    """Pages of docs/experiments, below docs/, the index first."""
    names = sorted(path.name for path in (DOCS / "experiments").glob("*.md") if path.name != "index.md")
    return [f"experiments/{name}" for name in ("index.md", *names)]


def title_and_lead(page: str) -> tuple[str, str]:
    """Heading and first paragraph of a page."""
    parts = [part for part in (DOCS / page).read_text(encoding="utf-8").split("\n\n") if part.strip()]
    heading = parts[0].strip().removeprefix("# ").splitlines()[0]
    lead = " ".join(parts[1].split()) if len(parts) > 1 else ""
    return heading, lead


def experiments(_arguments: str, page: str) -> str:
    lines = ["| experiment | what it asks |", "| --- | --- |"]
    for name in experiment_pages()[1:]:
        heading, lead = title_and_lead(name)
        lines.append(f"| [{heading}]({posixpath.relpath(name, posixpath.dirname(page))}) | {lead} |")
    return "\n".join(lines) if len(lines) > 2 else "No experiment has been written up yet."


# ---- equations


def equation(tex: str, display: bool) -> str:
    """An equation as an SVG element in the text's colour and size. Raises ValueError if it cannot be set."""
    with rc_context({"mathtext.fontset": "cm"}):
        try:
            path = TextPath((0, 0), f"${tex}$", size=EM, usetex=False)
        except ValueError as error:
            raise ValueError(f"equation {tex!r}: {' '.join(str(error).split())}") from None
    steps, at = [], 0
    points = path.vertices * (1, -1)  # SVG counts downwards
    while at < len(path.codes):
        letter, count = CURVES[int(path.codes[at])]
        steps.append(letter + " ".join(f"{x:.2f} {y:.2f}" for x, y in points[at : at + count] if letter != "Z"))
        at += count
    (left, top), (right, bottom) = points.min(0) - 0.5, points.max(0) + 0.5
    style = f"width:{(right - left) / EM:.2f}em;height:{(bottom - top) / EM:.2f}em;vertical-align:{-bottom / EM:.2f}em"
    label = html.escape(tex, quote=True)
    drawn = (
        f'<svg class="eq" role="img" aria-label="{label}" style="{style}" '
        f'viewBox="{left:.2f} {top:.2f} {right - left:.2f} {bottom - top:.2f}"><path d="{"".join(steps)}"/></svg>'
    )
    return f'<div class="eq">{drawn}</div>' if display else drawn


def equations(text: str) -> str:
    """Markdown with its equations drawn; every line of a block is one."""

    def block(found: re.Match) -> str:
        return "".join(equation(line.strip(), True) for line in found[1].splitlines() if line.strip()) + "\n"

    text = MATH_BLOCK.sub(block, text)
    return MATH_INLINE.sub(lambda found: equation(found[1].strip(), False), text)


# ---- figures


def figures(content: str, page: str) -> str:
    """HTML with every image of docs/figures replaced by its SVG, which takes the page's colours; `alt` becomes the
    caption."""

    def inline(found: re.Match) -> str:
        alt = re.search(r'alt="([^"]*)"', found[0])
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))
        svg = text_of(f"docs/{file}")
        return f'<figure class="plot">{svg}<figcaption>{alt[1] if alt else ""}</figcaption></figure>'

    return re.sub(r'<p><img [^>]*?src="((?:\.\./)*figures/[^"]+\.svg)"[^>]*></p>', inline, content)


# ---- what MkDocs calls


EXPANDERS = {"source": source, "rows": rows, "experiments": experiments}


def expand(text: str, page: str) -> str:
    """A page of docs/ with everything put in. Raises ValueError naming what does not exist."""
    text = DIRECTIVE.sub(lambda found: EXPANDERS[found[1]](found[2], page), text)
    return FILE_LINK.sub(lambda found: file_link(found[1], page), equations(text))


def files_shown(text: str) -> set[str]:
    """Files of the repository that a page, expanded, links to."""
    return set(re.findall(r"\]\((?:\.\./)*source/([^)#]+)\.md", text))


def on_config(config: Any) -> Any:
    """Every page of docs/experiments stands in the navigation."""
    for entry in config.nav:
        if entry.get("Experiments") == "experiments/":
            entry["Experiments"] = experiment_pages()
    return config


def on_files(files: Any, config: Any) -> Any:
    """A page for every file that a page links to."""
    from mkdocs.structure.files import File

    shown: set[str] = set()
    for file in files.documentation_pages():
        shown |= files_shown(expand(file.content_string, file.src_uri))
    for path in sorted(shown):
        language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
        head = f"---\nsearch:\n  exclude: true\n---\n\n# {posixpath.basename(path)}\n\n`{path}`\n\n"
        body = f'````{language} {{ linenums="1" }}\n{text_of(path)}````\n'
        files.append(File.generated(config, source_page(path), content=head + body))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri.startswith("source/") else expand(markdown, page.file.src_uri)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    return figures(content, page.file.src_uri)
