"""tests/lint/native.py finds what it promises to find, and nothing else."""

from pathlib import Path

import pytest

from tests.lint import native


def findings(tmp_path: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        f"{path.relative_to(tmp_path)}:{line}: {message.splitlines()[0]}"
        for path, line, message in native.check_tree(tmp_path)
    ]


def test_sound_tree(tmp_path: Path) -> None:
    assert not findings(
        tmp_path,
        {
            "base/base.h": "#include <stdint.h>\nuint64_t clock_ns(void);\n",
            "base/lock.h": '#include "base/base.h"\n',
            "ids/ids.c": '#include "base/base.h"\n'
            "/* never strcpy(), nor gets(); it comes from go_on() */\n"
            '/* CAME */ const char *other = "under way";\n'
            'const char *text = "sprintf(";\n'
            "int my_rand(int x) { return x; }\n"
            "int f(void)\n{" + "\n" * 61 + "}\n"
            "struct an_index {\n    int x;\n};\n"
            "static int ids_of(int a)\n{\n}\n"
            "static int set_ids(int a)\n{\n}\n"
            "static int index_find(int a)\n{\n}\n"
            "static const entry *take_entry(int a)\n{\n}\n"
            "HOT static int\nstripe_lock(int a, struct stripes *s)\n{\n}\n"
            "static int find(int a);\n"
            "static int *table[2] = {\n    find(1)\n};\n",
            "ids/stripe.h": "typedef struct table_stripe {\n    int x;\n"
            "} table_stripe;\n",
            "ids/other.c": "static int stripe_new(void)\n{\n}\n",
            "py/core.c": '#include <Python.h>\n#include "ids/ids.h"\n',
            "tests/ids/test_ids.c": '#include "base/lock.h"\n',
        },
    )


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("ids/ids.c", '#include "table/table.h"', "ids stands above table"),
        (
            "client/open.c",
            '#include "server/server.h"',
            "client stands above server",
        ),
        ("rpc/rpc.c", '#include "wire/wire.h"', "must not know wire"),
        ("ids/ids.c", '#include "data/data.h"', "must not know data"),
        ("wire/put.c", '#include "table/table.h"', "must not know table"),
        ("ids/ids.c", '#include "base/lock.h"', "private to room base"),
        ("ids/ids.c", '#include "ids.h"', 'write "ids/..."'),
        ("ids/ids.c", "#include <Python.h>", "belongs to room py"),
        ("loop/loop.c", "#include <torch/all.h>", "belongs to room torch"),
        ("ids/ids.c", "x = sprintf(b, s);", "sprintf() is banned"),
        ("ids/ids.c", "x = rand ();", "rand() is banned"),
        ("rank/rank.c", "nanosleep(&pause, NULL);", "nanosleep(): see base/"),
        ("link/link.c", "pthread_join(t, NULL);", "pthread_join(): see base/"),
        ("loader/sender.c", "now = time (NULL);", "time(): see base/"),
        ("embedding_worker/work.c", "gettimeofday(&t, 0);", "gettimeofday()"),
        ("ids/ids.c", "int x; // TODO", "unfinished: TODO"),
        ("ids/ids.c", "int x; ", "white space at the end"),
        ("ids/ids.c", "\tint x;", "a tab"),
        ("ids/ids.c", "/*" + "-" * 80 + "*/", "84 columns"),
        ("ids/ids.c", "\n" * 800 + "int x;", "801 lines"),
        ("ids/ids.c", "int f(void)\n{" + "\n" * 62 + "}", "of 61 lines"),
        ("ids/ids.c", "static int find(int a)\n{\n}", "find() does not name"),
        ("ids/ids.c", "static int find_it(int a)\n{\n}", "find_it() does not"),
        ("ids/ids.c", "static int ids(int a)\n{\n}", "ids() does not name"),
        (
            "ids/ids.c",
            "static int\nof_8(uint64_t a, const void *b)\n{\n}",
            "of_8() does not name",
        ),
        ("ids/ids.c", "/* a row\n * comes */", "plainer words: 'comes'"),
        ("ids/ids.c", "int x; // nobody", "plainer words: 'nobody'"),
        ("misc/misc.c", "int x;", "misc is not a room"),
        ("ids/ids.h", "uint64_t x;", "does not compile alone"),
    ],
)
def test_finding(tmp_path: Path, name: str, line: str, message: str) -> None:
    found = findings(tmp_path, {name: line + "\n"})
    assert len(found) == 1
    assert message in found[0]
    assert found[0].startswith(name)


def test_missing_newline(tmp_path: Path) -> None:
    found = findings(tmp_path, {"ids/ids.c": "int x;"})
    assert found == ["ids/ids.c:1: no newline at the end"]
