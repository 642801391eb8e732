"""What is public is on the page of the API, and nothing else is."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import persia
from tests.docs.pages import DOCS, ROOT

MOST = 200
#: A value, and no class or function.
VALUES = {"persia.__version__"}


def public_modules() -> list[ModuleType]:
    """persia, and the modules that it exports."""
    names = [n for n in persia.__all__ if inspect.ismodule(getattr(persia, n))]
    return [persia, *(importlib.import_module(f"persia.{n}") for n in names)]


def exported() -> dict[str, Any]:
    """Each name in ``__all__`` of a public module, but for modules."""
    found = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in public_modules()
        for name in module.__all__
    }
    return {n: one for n, one in found.items() if not inspect.ismodule(one)}


def documented() -> Iterator[str]:
    """The full names on the page, those that automodule lists included."""
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    module = "persia"
    for found in re.finditer(
        r"\.\. (currentmodule|auto\w+):: ([\w.]+)((?:\(\))?\n(?:   .*\n)*)",
        text,
    ):
        kind, name, options = found.groups()
        if kind == "currentmodule":
            module = name
        elif kind == "automodule":
            left_out = re.findall(r":exclude-members: (.*)", options)
            for each in importlib.import_module(name).__all__:
                if each not in " ".join(left_out).split():
                    yield f"{name}.{each}"
        else:
            yield name if "." in name else f"{module}.{name}"


def test_the_page_lists_what_is_exported() -> None:
    listed = list(documented())
    assert len(listed) == len(set(listed)) <= MOST
    assert {*listed} == {*exported()} - VALUES


def test_a_thing_has_one_name() -> None:
    things: dict[int, list[str]] = {}
    for name, one in exported().items():
        things.setdefault(id(one), []).append(name)
    assert not [names for names in things.values() if len(names) > 1]


def test_no_other_module_exports() -> None:
    """Names of other modules are for Persia alone: they have no __all__."""
    ours = {str(module.__file__) for module in public_modules()}
    paths = set((ROOT / "persia").rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        has = re.search(r"^__all__\b", path.read_text("utf-8"), re.MULTILINE)
        assert bool(has) == (str(path) in ours), path


def signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Of the public functions, classes and their public methods."""

    def of(name: str, call: Callable[..., Any]) -> Iterator[Any]:
        try:
            yield name, inspect.signature(call)
        except (TypeError, ValueError):  # a class of the core
            return

    for name, one in exported().items():
        if not callable(one):
            continue
        yield from of(name, one)
        for method, call in vars(one).items() if inspect.isclass(one) else ():
            if not method.startswith("_") and inspect.isfunction(call):
                yield from of(f"{name}.{method}", call)


#: Options that mean the same wherever they are.
SAME = {"batch_size", "seed", "shuffle", "malformed_limit", "strict"}
#: Where the name means something else: without a seed nothing is drawn; what
#: is loaded strictly is a state, as in torch.
OTHERS = {
    "persia.data.Table.split": {"seed"},
    "persia.Store.load": {"strict"},
}


def test_an_option_has_one_default() -> None:
    """In Python and in commands alike."""
    import tables

    found: dict[str, dict[Any, list[str]]] = {}

    def note(option: str, default: Any, where: str) -> None:
        found.setdefault(option, {}).setdefault(default, []).append(where)

    for name, signature in signatures():
        for option in SAME & {*signature.parameters}:
            default = signature.parameters[option].default
            given = default is not inspect.Parameter.empty
            if given and option not in OTHERS.get(name, ()):
                note(option, default, name)
    for name, command in tables.commands().items():
        for one in command.params:
            option = str(one.name)
            if option in SAME and one.default is not None:
                note(option, one.default, name)
    assert {*found} == SAME
    assert not {o: by for o, by in found.items() if len(by) > 1}


def test_learning_rates_of_the_command_are_those_of_the_optimizers() -> None:
    from persia.optim import ALGORITHMS
    from persia.train.config import resolve

    for name, kind in ALGORITHMS.items():
        default = inspect.signature(kind).parameters["lr"].default
        if default is not inspect.Parameter.empty:
            assert resolve({"optimizer": name}).learning_rate == default
            assert kind().defaults["lr"] == default


#: Where workers are addresses of embedding workers.
WORKERS = {"persia.Stream", "persia.data.Sender"}
#: Where rows are those of a table.
ROWS = {
    "persia.checkpoint.Checkpoint",
    "persia.export",
    "persia.nn.Sequences",
    "persia.serving.Exported",
    "persia.serving.Publish",
}


def test_parameters_have_the_words_of_the_glossary() -> None:
    """Lines of data are samples, ranks are as in torch, and workers are those
    that hold batches."""
    for name, signature in signatures():
        given = {*signature.parameters}
        assert not given & {"shard", "world"}, name
        assert "workers" not in given or name in WORKERS, name
        assert "rows" not in given or name in ROWS, name
