"""The tools that build the documentation."""

import sys

from tests.docs.pages import DOCS

sys.path.insert(0, str(DOCS / "_tools"))
