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
            "int f(void)\n{" + "\n" * 61 + "}\n",
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
