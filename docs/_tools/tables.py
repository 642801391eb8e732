"""The reference pages that follow from code, as Markdown.

``docs/conf.py`` writes them to ``docs/_generated`` at each build.
"""

from __future__ import annotations

import base64
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import nbformat
import pydantic
import typer
import typer.main

from persia.errors import flagged

ROOT = Path(__file__).parents[2]

#: Variables that a user sets: what each does, and who reads it.
VARIABLES = {
    "PERSIA_SERVERS": "addresses of the parameter servers, `host:port` with "
    "commas between; read by `Store`, `persia train`, `persia serve worker`",
    "PERSIA_WORKERS": "addresses of the embedding workers; read by "
    "`persia.Stream`, `persia.data.Sender`, `persia train`, `persia feed`. "
    "`file:/path` and `dns:name:port` are read again while they run",
    "PERSIA_NAMESPACE": "the namespace of the tables; read by `Store`, "
    "`persia.data.Sender` and all commands with `--namespace`",
    "PERSIA_TLS_CA": "file of the certificate authority of the servers",
    "PERSIA_TLS_CERT": "file of the client's certificate (mutual TLS)",
    "PERSIA_TLS_KEY": "file of its private key",
    "PERSIA_TLS_SERVER_NAME": "the name that the server's certificate must "
    "have, if it is not the host of the address",
    "PERSIA_TOKEN": "the token of users",
    "PERSIA_TOKEN_FILE": "a file that holds it",
    "PERSIA_ADMIN_TOKEN": "the token of administrators",
    "PERSIA_ADMIN_TOKEN_FILE": "a file that holds it",
    "PERSIA_INSECURE": "`1`: connect to addresses beyond loopback without "
    "TLS and token",
    "PERSIA_JOB_SECRET": "the same secret words on all ranks: encrypts the "
    "keys that rank 0 makes for ranks on several machines; such a job needs "
    "it, or certificates",
    "PERSIA_CHECKPOINTS": "a local folder for checkpoints on their way to or "
    "from remote storage; of tables on ranks, one that all ranks see",
    "PERSIA_SCALE_LOG": "file of the decisions of `persia launch "
    "--autoscale`, which sets it for its command; read by `persia status`",
    "PERSIA_METRICS_PORT": "port of the metrics of the first rank on a host; "
    "the others follow. Read by `persia train` and "
    "`persia.prometheus.export`",
    "PERSIA_METRICS_HOST": "address that they listen on; default `127.0.0.1`",
    "PERSIA_TRACE_RATE": "share of the batches, and of the requests to "
    "models, that is traced, from 0 to 1, the same in all processes: see "
    "[traces](../howto/traces.md)",
    "PERSIA_SHARD": "index of this server, for `persia serve ps --shard auto`",
    "PERSIA_SHARDS": "number of servers, for `persia serve ps`",
    "PERSIA_RUN_ID": "name of the run of `persia launch`: the job of a "
    "`Store`, a `Stream`, a `Sender`, `persia train` and `persia feed` that "
    "name none",
    "PERSIA_LOG_LEVEL": "the least important lines that a command and the "
    "processes that it starts write, as with `--log-level`",
    "PERSIA_LOG_FORMAT": "how they write lines, as with `--log-format`",
    "PERSIA_AUDIT_LOG": "file to which they append who changed what, as with "
    "`--audit-log`",
    "PERSIA_SERVING_PROCESS": "set by `persia serve model --processes`, for "
    "the processes that it starts",
    "PERSIA_DEBUG": "`1`: the command shows tracebacks, as with `--debug`",
}

#: Variables of others that Persia reads.
FOREIGN = {
    "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR": "of torchrun: the ranks of "
    "the job",
    "TORCHELASTIC_RUN_ID": "of torchrun (`--rdzv-id`): the job of a `Store`",
    "JOB_COMPLETION_INDEX, POD_NAME": "of Kubernetes: the index of a server "
    "with `--shard auto`",
    "KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT": "of Kubernetes: the "
    "API server, for `persia gate`",
    "NOTIFY_SOCKET": "of systemd: where a unit with `Type=notify` waits for "
    "word that it serves",
    "OMP_NUM_THREADS": "threads of torch; torchrun sets it to 1",
    "AWS_…, GOOGLE_…": "keys of remote storage, as pyarrow reads them",
    "OTEL_…": "of OpenTelemetry: where traces are sent, and what is sent "
    "with them",
    "NO_COLOR": "no colours in the terminal",
}


def _row(*cells: object) -> str:
    text = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(text)} |"


def options(*rows: Iterable[object]) -> str:
    """A table whose first column does not break."""
    return f":::{{container}} options\n\n{table(*rows)}\n:::"


def table(*rows: Iterable[object]) -> str:
    """A table of Markdown; the first row has its names."""
    first, *rest = [list(row) for row in rows]
    lines = [_row(*first), _row(*("---" for _ in first))]
    return "\n".join([*lines, *(_row(*row) for row in rest)])


def _sentence(text: str) -> str:
    """Help as one line, with words that Markdown would change as code."""
    text = " ".join(text.split())
    return re.sub(r"(--[a-z-]+|<[a-z]+>)", r"`\1`", text).replace("*", "\\*")


def _paragraph(text: str) -> str:
    """Help as Markdown: examples are commands, a line each."""
    lines = text.split("\n")
    if all(re.match("(persia|torchrun) ", line.strip()) for line in lines):
        return "\n".join(["```text", *map(str.strip, lines), "```"])
    return _sentence(text)


def _word(argument: Any) -> str:
    """An argument as a usage line has it."""
    word: str = argument.metavar or argument.name
    return word if word.startswith("--") else word.upper()


# ---- command line ----------------------------------------------------------


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner or name == "persia":
        yield name, command
    for word, one in inner.items():
        yield from _commands(one, f"{name} {word}")


def commands() -> dict[str, Any]:
    """The commands by their names, ``persia`` itself first."""
    from persia.cli.app import app

    return dict(_commands(typer.main.get_command(app), "persia"))


def _default(option: Any) -> str:
    shown = option.show_default
    if isinstance(shown, str):
        return _sentence(shown)
    if option.default in (None, False, (), "") or not shown or option.is_flag:
        return ""
    return f"`{option.default}`"


def _choices(option: Any) -> str:
    """The words that it takes, if these are few."""
    kind = option.type_descriptor.annotation
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = tuple(one.value for one in kind)
    return ", ".join(f"`{word}`" for word in words) + ": " if words else ""


def cli() -> str:
    """All commands with their options."""
    from persia.cli.shared import PANEL as ALL

    every = commands()
    of_all = [
        (f"`{p.opts[-1]}`", _default(p), _sentence(p.help))
        for p in every["persia doctor"].params
        if p.rich_help_panel == ALL
    ]
    out = ["## Options of every command\n"]
    out.append(options(("option", "default", ""), *of_all) + "\n")
    for name, command in every.items():
        out.append(f"## `{name}`\n")
        paragraphs = (command.help or "").strip().split("\n\n")
        out += [_paragraph(text) + "\n" for text in paragraphs]
        arguments = [p for p in command.params if p.opts[0][0] != "-"]
        flags = [p for p in command.params if p.opts[0][0] == "-"]
        flags = [p for p in flags if p.rich_help_panel != ALL]
        words = " ".join(
            _word(p) if p.required else f"[{_word(p)}]" for p in arguments
        )
        words = f"{name} [OPTIONS] {words}".strip()
        out.append(f"```text\n{words}\n```\n")
        if arguments:
            rows = [
                (f"`{_word(p)}`", _sentence(p.help or "")) for p in arguments
            ]
            out.append(table(("argument", ""), *rows) + "\n")
        panels = defaultdict(list)
        for option in flags:
            if option.name != "help":
                panels[option.rich_help_panel].append(option)
        for panel, some in panels.items():
            rows = [
                (
                    f"`{o.opts[-1]}`"
                    + (
                        f", `{o.secondary_opts[0]}`"
                        if o.secondary_opts
                        else ""
                    ),
                    _default(o),
                    _choices(o) + _sentence(o.help or ""),
                )
                for o in some
            ]
            title = (panel or "option", "default", "")
            out.append(options(title, *rows) + "\n")
    return "\n".join(out)


# ---- configuration ---------------------------------------------------------


def _kind(annotation: Any) -> str:
    name = getattr(annotation, "__name__", "")
    if not name or getattr(annotation, "__args__", ()):
        name = str(annotation)
    name = re.sub(r"\b(?:pathlib|pydantic|typing|types)\.(\w+\.)*", "", name)
    choices = re.fullmatch(r"Literal\[(.*)\]", name)
    if choices:
        return choices[1].replace("'", "`")
    return name.replace("ByteSize", "bytes, such as `64GiB`")


def configurations() -> dict[str, type[pydantic.BaseModel]]:
    """The classes that check options, by the command."""
    from persia.cli.feed import FeedConfig
    from persia.distributed.server import ServeConfig
    from persia.distributed.worker import WorkerConfig
    from persia.kubernetes.process import GateConfig
    from persia.serving.config import ModelConfig, RelayConfig
    from persia.train.config import TrainConfig

    return {
        "persia train": TrainConfig,
        "persia serve ps": ServeConfig,
        "persia serve worker": WorkerConfig,
        "persia serve model": ModelConfig,
        "persia serve export": RelayConfig,
        "persia feed": FeedConfig,
        "persia gate": GateConfig,
    }


def config() -> str:
    """The names, types and defaults of options in YAML files."""
    out = []
    for command, model in configurations().items():
        out.append(f"## `{command}`\n")
        rows = []
        for key, field in model.model_fields.items():
            kind = _kind(field.annotation)
            default = f"`{field.default}`"
            if field.default is None or field.default_factory:
                default = ""
            about = _sentence(flagged(field.description or ""))
            rows.append((f"`{field.alias or key}`", kind, default, about))
        out.append(options(("option", "type", "default", ""), *rows) + "\n")
    return "\n".join(out)


def environment() -> str:
    """The variables of the environment."""
    own = [(f"`{k}`", v) for k, v in VARIABLES.items()]
    other = list(FOREIGN.items())
    return (
        options(("variable", "meaning"), *own)
        + "\n\n## Of others\n\n"
        + table(("variable", "meaning"), *other)
    )


# ---- errors ----------------------------------------------------------------


def codes() -> dict[str, tuple[str, str]]:
    """Code and message of csrc/base/base.h, by the name of the class."""
    text = (ROOT / "csrc/base/base.h").read_text(encoding="utf-8")
    found = re.findall(r'X\((PERSIA_\w+), "(\w+)",\s*\\?\s*"([^"]+)"\)', text)
    return {name: (code, message) for code, name, message in found}


def error_codes() -> str:
    """The classes of persia.errors with the codes of the C core."""
    from persia import errors

    known, rows = codes(), []
    for name in errors.__all__:
        kind = getattr(errors, name)
        base = [
            b.__name__
            for b in kind.__bases__
            if b.__module__ != kind.__module__
        ]
        code, message = known.get(name, ("", ""))
        link = f"{{exc}}`~persia.errors.{name}`"
        rows.append(
            (link, f"`{code}`" if code else "", ", ".join(base), message)
        )
    return table(("class", "C code", "is also", "meaning"), *rows)


# ---- metrics ---------------------------------------------------------------


class _Every(dict[str, Any]):
    """Statistics that have every counter."""

    def __missing__(self, name: str) -> Any:
        return 1


def metrics() -> str:
    """What servers and ranks export to Prometheus."""
    import persia
    from persia import _core, prometheus
    from persia.serving.measures import Measures

    some = _Every(tables=[_Every(name="t")])
    calls = {"Pull": (tuple(range(len(_core.CALL_BOUNDS) + 1)), 1.0, 1, 1)}
    core = types.SimpleNamespace(
        calls=lambda: calls, denied=dict, waits=lambda: (0.0, 0.0)
    )
    server = prometheus.ServerCollector(
        lambda: {0: some}, core, 1, "default", 1
    )
    with persia.Store(servers="embedded") as store:
        worker = list(prometheus.StoreCollector(store).collect())
    measured = Measures()
    measured.watch("queue_samples", "Samples that wait.", lambda: 0.0)
    measured.count("m", "ok")
    out = []
    for title, families in (
        ("A server, at `--metrics-port`", server.collect()),
        (
            "An embedding worker, at `--metrics-port`",
            prometheus.EmbeddingWorkerCollector(lambda: some, core).collect(),
        ),
        (
            "A data loader, at `--metrics-port`",
            prometheus.FeedCollector(
                lambda: some, lambda: {"topic/0": 1}
            ).collect(),
        ),
        (
            "A process that serves models, at `--metrics-port`",
            measured.collect(),
        ),
        ("A rank, at `PERSIA_METRICS_PORT`", worker),
    ):
        rows = []
        for family in families:
            labels = {k for s in family.samples for k in s.labels} - {"le"}
            name = family.name + "_total" * (family.type == "counter")
            rows.append(
                (
                    f"`{name}`",
                    family.type,
                    ", ".join(sorted(labels)),
                    family.documentation,
                )
            )
        out.append(f"## {title}\n\n")
        out.append(table(("metric", "kind", "labels", "meaning"), *rows))
        out.append("\n\n")
    return "".join(out)


# ---- wire ------------------------------------------------------------------


def _comment(lines: list[str]) -> str:
    text = " ".join(line.strip().removeprefix("//").strip() for line in lines)
    text = re.sub(r"@\w+(=\S+)?( = \S+)?", "", text)
    return " ".join(text.split()).replace("<", "\\<")


def wire() -> str:
    """Services and messages of persia/persia.proto."""
    text = (ROOT / "persia/persia.proto").read_text(encoding="utf-8")
    out: list[str] = []
    waiting: list[str] = []
    rows: list[list[str]] = []
    for line in text.splitlines()[
        text[: text.index("package ")].count("\n") :
    ]:
        bare = line.strip()
        if bare.startswith("// ----"):
            continue
        if bare.startswith("//"):
            # A comment behind a field may go on in the next line.
            waiting.append(bare)
            continue
        begins = re.match(r"(service|message|enum) (\w+) {", bare)
        rpc = re.match(r"rpc (\w+)\((\w+)\) returns \((\w+)\);", bare)
        field = re.match(
            r"(?:(repeated|optional) )?(?:(\w+) )?(\w+) = (\d+)", bare
        )
        tail = bare.split("//", 1)[1:] if "//" in bare else []
        if begins:
            out.append(f"### {begins[2]}\n\n{_comment(waiting)}\n")
            kind = begins[1]
            names = {
                "service": ("call", "request", "reply", ""),
                "message": ("field", "number", "type", ""),
                "enum": ("value", "number", ""),
            }[kind]
            rows = [list(names)]
        elif rpc:
            rows.append([f"`{rpc[1]}`", rpc[2], rpc[3], _comment(waiting)])
        elif field and rows:
            kind = " ".join(w for w in (field[1], field[2]) if w)
            cells = [f"`{field[3]}`", field[4], kind, _comment(waiting + tail)]
            if len(rows[0]) == 3:
                del cells[2]
            rows.append(cells)
        elif bare == "}" and rows:
            out.append(table(*rows) + "\n")
            rows = []
        waiting = []
    return "\n".join(out)


# ---- files -----------------------------------------------------------------


def manifest() -> str:
    """The entries of manifest.json."""
    from persia.checkpoint import manifest as entries

    out = []
    names = ("Manifest", "Table", "RowFile", "File", "Shard", "Ledger")
    for name in names:
        model = getattr(entries, name)
        rows = [
            (
                f"`{key}`",
                _kind(field.annotation).replace(
                    "persia.checkpoint.manifest.", ""
                ),
            )
            for key, field in model.model_fields.items()
        ]
        about = " ".join((model.__doc__ or "").split()).replace("`", "")
        out.append(f"### {name}\n\n{about}\n\n")
        out.append(table(("entry", "type"), *rows) + "\n\n")
    return "".join(out)


# ---- notebooks -------------------------------------------------------------


def notebook(path: Path, folder: Path) -> str:
    """A notebook with its outputs as Markdown; plots go into ``folder``."""
    out = []
    plots = 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            out.append(cell.source)
            continue
        out.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                plots += 1
                image = folder / f"{path.stem}-{plots}.png"
                image.write_bytes(base64.b64decode(data["image/png"]))
                out.append(f"![plot](/_generated/{image.name})")
                continue
            text = output.get("text") or data.get("text/plain", "")
            if text.strip():
                out.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(out) + "\n"


PAGES = {
    "cli": cli,
    "config": config,
    "environment": environment,
    "errors": error_codes,
    "metrics": metrics,
    "wire": wire,
    "manifest": manifest,
}


def write(docs: Path) -> None:
    """Writes all of them to ``docs/_generated``."""
    folder = docs / "_generated"
    folder.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (folder / f"{name}.md").write_text(make(), encoding="utf-8")
    for path in docs.glob("tutorials/*.ipynb"):
        text = notebook(path, folder)
        (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
