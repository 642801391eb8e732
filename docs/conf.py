"""Sphinx configuration; `make docs` builds with warnings as errors."""

from importlib.metadata import PackageNotFoundError, version

project = "Persia"
author = "the Persia developers"
copyright = author  # noqa: A001 (Sphinx's name)
try:
    release = version("persia")
except PackageNotFoundError:  # built from the source tree
    release = ""

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
