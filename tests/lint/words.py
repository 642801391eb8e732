"""Words that texts for readers do not have: see docs/dev/style.md.

Pages, docstrings, help, messages and comments obey this one list: for what is
here write "arrives", "receives", "continues", "in flight", "again", "no
client", "except", "lookup".
"""

from __future__ import annotations

import re

WORDS = re.compile(
    r"\b((?:is|are|was|were|be) told|told so|anew|nobody|whoever"
    r"|goes on|go on|going on|who does not|under way|in hand|but for"
    r"|hears?|tells? of|look-ups?"
    r"|(?:comes?|came)(?! (?:from|first|last|before|back|together)))\b",
    re.IGNORECASE,
)
