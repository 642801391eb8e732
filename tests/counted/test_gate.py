"""The counted gate reads callgrind's files and knows its tolerances."""

from tests.counted import gate

PROFILE = """\
events: Ir
fn=(1) counted_pull_16
10 100
+2 20
cfn=(2) table_pull
calls=1 30
+1 3000
* 5

fn=(2)
30 2000
cfn=(3) memcpy
calls=4 1
31 1000

fn=(4) main
1 1
cfn=(1)
calls=1 10
2 3125

fn=(1)
12 1
"""


def test_what_functions_call_counts() -> None:
    assert gate.inclusive(PROFILE) == {"pull_16": 3126}


def test_tolerances() -> None:
    before = {
        "pull_16": 1000,
        "step_forward": 1000,
        "remote_step_bytes_in": 1000,
        "remote_step_allocations": 1000,
        "remote_step_instructions": 1000,
    }

    def changed(**more: int) -> list[str]:
        lines = gate.differences(before, before | more)
        return [line.partition(":")[0] for line in lines]

    assert changed() == []
    assert changed(pull_16=1020, step_forward=970) == []
    assert changed(pull_16=1021) == ["pull_16"]
    assert changed(pull_16=979) == ["pull_16"]
    assert changed(step_forward=1031) == ["step_forward"]
    assert changed(remote_step_bytes_in=1001) == ["remote_step_bytes_in"]
    assert changed(remote_step_allocations=1050) == []
    assert changed(remote_step_allocations=1051)
    assert changed(remote_step_instructions=9000) == []
    assert changed(pull_64=1) == ["pull_64"]
    assert gate.differences(before, {**before} | {"pull_16": 1000}) == []
