"""The admission policy of deploy/gate, evaluated by a library for CEL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.manifests import of_kind, render

celpy = pytest.importorskip("celpy", reason="pip install cel-python")

GATE = "system:serviceaccount:persia:persia-gate"
USER = "kubernetes-admin"


def evaluate(expression: str, **names: Any) -> Any:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate(
        {name: celpy.json_to_cel(value) for name, value in names.items()}
    )


def admitted(
    before: dict[str, Any],
    after: dict[str, Any],
    user: str = USER,
    name: str = "persia-ps",
) -> bool:
    """Whether an object may be replaced: its ``spec`` before and after."""
    (policy,) = of_kind(render("gate"), "ValidatingAdmissionPolicy")
    spec = policy["spec"]
    given: dict[str, Any] = {
        "object": {"metadata": {"name": name}, "spec": after},
        "oldObject": {"metadata": {"name": name}, "spec": before},
        "request": {
            "name": name,
            "namespace": "persia",
            "userInfo": {"username": user},
        },
    }
    for condition in spec["matchConditions"]:
        if not evaluate(condition["expression"], **given):
            return True  # the policy does not look at it
    given["variables"] = {
        one["name"]: int(evaluate(one["expression"], **given))
        for one in spec["variables"]
    }
    return all(
        bool(evaluate(one["expression"], **given))
        for one in spec["validations"]
    )


@pytest.mark.parametrize(
    ("before", "after", "user", "name", "want"),
    [
        ({"replicas": 4}, {"replicas": 3}, USER, "persia-ps", False),
        ({"replicas": 4}, {"replicas": 3}, GATE, "persia-ps", True),
        ({"replicas": 4}, {"replicas": 3}, USER, "persia-worker", True),
        ({"replicas": 4}, {"replicas": 4}, USER, "persia-ps", True),
        ({"replicas": 4}, {"replicas": 5}, USER, "persia-ps", True),
        # A Scale leaves a 0 out: all servers stop, and save.
        ({"replicas": 4}, {}, USER, "persia-ps", True),
        ({}, {"replicas": 4}, USER, "persia-ps", True),
        (
            *({"replicas": 4}, {"replicas": 3}),
            *("system:serviceaccount:other:persia-gate", "persia-ps", False),
        ),
    ],
)
def test_only_the_gate_lowers_the_number(
    before: dict[str, Any],
    after: dict[str, Any],
    user: str,
    name: str,
    want: bool,
) -> None:
    assert admitted(before, after, user, name) == want


def test_the_policy_sees_both_ways_to_the_number() -> None:
    objects = render("gate")
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy")
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert set(rule["resources"]) == {"statefulsets", "statefulsets/scale"}
    (binding,) = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    (gate,) = of_kind(render("overlays/gke"), "RoleBinding")
    (account,) = gate["subjects"]
    assert f"{account['namespace']}:{account['name']}" in GATE
