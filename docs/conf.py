"""Sphinx configuration; `make docs` builds with warnings as errors."""

import importlib.metadata
import sys
from pathlib import Path

from docutils import nodes

project = "Persia"
author = "the Persia developers"
copyright = author
try:
    release = importlib.metadata.version("persia")
except importlib.metadata.PackageNotFoundError:  # built from the source tree
    release = ""

# The package and its libraries are taken from the source tree.
DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_tools")]

import tables  # noqa: E402

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
exclude_patterns = ["_build", "_generated", "_tools"]

# References to Persia are checked. Those of others have no inventory here.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|np|numpy|pa|pyarrow|pd|pydantic|nn|os)\b.*"),
    (r"py:.*", r"(collections\.abc|datetime|pathlib|types)\..*"),
    (r"py:.*", r"NoneType|float \| tuple.*"),
    # Private classes in signatures: columns of a schema, type variables.
    (
        r"py:.*",
        r"persia\..*\.(T|_\w+|\w+Column|Annotated|Origin|Shared|TableConfig"
        r"|TrainConfig)",
    ),
    (r"py:.*", r"Pydantic\w+|_Pydantic\w+|FieldInfo|Path|Sharing"),
    (r"py:.*", r"persia\.base\.urls\.Url"),  # a str
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"Persia {release}".strip()
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["persia.css"]


def _inline(app, doctree, docname):
    """Puts drawings into the page, so that they have its colours."""
    for image in list(doctree.findall(nodes.image)):
        path = DOCS / image["uri"]
        if path.suffix == ".svg":
            text = path.read_text(encoding="utf-8")
            drawing = f'<div class="drawing">{text}</div>'
            image.replace_self(nodes.raw("", drawing, format="html"))


def setup(app):
    tables.write(DOCS)
    app.connect("doctree-resolved", _inline)
