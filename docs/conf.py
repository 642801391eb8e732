"""Sphinx configuration; `make docs` builds with warnings as errors."""

import importlib.metadata
import sys
from pathlib import Path

project = "Persia"
author = "the Persia developers"
copyright = author
try:
    release = importlib.metadata.version("persia")
except importlib.metadata.PackageNotFoundError:  # built from the source tree
    release = ""

# The package and its libraries are taken from the source tree.
sys.path.insert(0, str(Path(__file__).parents[1]))

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
exclude_patterns = ["_build"]
nitpicky = False

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
