"""Secrets that are planted in URLs, options and files are shown nowhere."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import traceback
import urllib.parse
from pathlib import Path
from typing import Any

import fsspec
import pytest
import typer.testing
from hypothesis import example, given
from hypothesis import strategies as st

from persia import errors
from persia.base.arguments import hide_secrets
from persia.base.options import read_yaml, validated
from persia.base.urls import Url
from persia.base.warning import warn
from persia.cli.app import app
from persia.cli.feed import FeedConfig
from persia.cli.launch import hidden
from persia.data import Files, Kafka
from persia.distributed.addresses import resolve
from persia.distributed.certs import one_job
from persia.distributed.security import Security
from persia.distributed.server import ServeConfig
from persia.distributed.status import ask_trainers
from persia.distributed.worker import WorkerConfig
from persia.redaction import MARK, clean, shown
from persia.train.config import resolve as options_of
from persia.train.saved import Trained
from persia.train.sources import open_data

SECRET = secrets.token_hex(12)

#: Every form of a URL that has a secret; {} is it.
FORMS = [
    "s3://key:{}@bucket/logs/*.csv",
    "s3://{}:word@bucket/a.csv?region=eu&scheme=http",
    "s3://key:a/{}@bucket/a.csv",
    "s3://key:{}/b+c=@bucket/a.csv",
    "s3://key:1/{}@bucket/a.csv",
    "s3://key:a?{}@bucket/a.csv",
    "s3://key:a#{}@bucket/a.csv",
    "https://key:/{}?@host",
    "https://key:1/{}?a@host/a.csv",
    "s3://key:{}",
    "s3://bucket/a.csv?access_key={}",
    "s3://bucket/part-?.csv?region=eu&session_token={}",
    "s3://bucket/a.csv?endpoint_override=http%3A//u:{}%40host",
    "https://host/a.csv?X-Amz-Credential={}&X-Amz-Signature={}",
    "https://host/a.csv?{}",
    "https://user:{}@host:8443/a.csv",
    "https://{}@host/a.csv",
    "https://host/a.csv#access_token={}",
    "HTTPS://user:{}@host/a.csv?sig={}",
    "http://[::1]:80/a.csv?token={}",
    "hdfs://user:{}@node:8020/a.csv",
    "webhdfs://node:9870/a.csv?delegation={}",
    "abfss://container:{}@account.dfs.core.windows.net/a.csv",
    "gs://bucket/a.csv?token={}",
    "ftp://user:{}@host/a.csv",
    "memory://user:{}@host/a.csv",
    "simplecache::https://user:{}@host/a.csv?sig={}",
    "zip://a.csv::https://user:{}@host/z.zip?sig={}",
    "zip://in/a.csv::https://user:{}@host/z.zip?sig={}",
    "avazu:s3://key:{}@bucket/a.csv",
    "kafka://user:{}@b1:9092,b2:9092/clicks?group=g",
    "kafka://b1:9092/clicks?group=g&value_registry=https://u:{}@registry",
    "kafka://b1:9092/clicks?group=g&sasl.password={}",
]


def form(text: str) -> str:
    return text.replace("{}", SECRET)


every_form = pytest.mark.parametrize("url", [*map(form, FORMS)], ids=FORMS)


def all_of(error: BaseException) -> str:
    """What a traceback of it shows."""
    return "".join(traceback.format_exception(error)) + repr(error)


@every_form
def test_a_location_shows_none(url: str) -> None:
    place = Url(url)
    for text in (
        str(place),
        f"{place}",
        f"{place!r}",
        f"{place:>9}",
        place.__str__(),
    ):
        assert SECRET not in text
    assert place.whole == url and place == url
    assert Url(place).whole == url
    copied = pickle.loads(pickle.dumps(place))
    assert type(copied) is Url and copied.whole == url
    assert SECRET not in shown(f"cannot open {url!r}: 403, url={url}, no")
    local = Path("/tmp", url)  # as of --out, or of a URL with one slash
    assert SECRET not in shown(f"no file at '{local}': {Path(url)} is none")
    assert SECRET not in str(Url(str(Path(url))))
    assert str(Url(str(place))) == str(place)


WORDS = st.text("abcXYZ019_~-", min_size=1, max_size=8)
KEYS = st.text("ab9+/=?#:&%._~-", min_size=1, max_size=6)


@given(
    scheme=st.sampled_from(["s3", "gs", "https", "ftp", "hdfs"]),
    before=KEYS,
    after=KEYS,
    host=WORDS,
    path=st.lists(WORDS, max_size=3),
)
@example("s3", "1/", "", "bucket", ["a"])
def test_a_password_of_any_letters(
    scheme: str, before: str, after: str, host: str, path: list[str]
) -> None:
    secret = before + SECRET + after
    url = f"{scheme}://key:{secret}@{'/'.join([host, *path])}"
    assert SECRET not in str(Url(url))
    assert SECRET not in shown(f"error: {url}: none")
    assert SECRET not in shown(f"error: {Path(url)}: none")
    quoted = urllib.parse.quote(secret, safe="")
    url = f"{scheme}://key:{quoted}@{'/'.join([host, *path])}"
    assert SECRET not in str(Url(url))
    assert str(Url(url)).endswith("/".join([host, *path]))


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b/part-?.csv",
        "s3://bucket/a.csv?region=eu&endpoint_override=http%3A//h%3A9000",
        "gs://bucket/day_[0-9].csv",
        "https://host:8443/a.csv",
        "hdfs://user@node:8020/a.csv",
        "kafka://b1:9092,b2:9092/t?group=g&since=2026-11-25T08:00Z&strict=true",
        "file:///tmp/a.csv",
        "drift?churn=0.2&windows=3",
        "/tmp/a/part-?.csv",
        "no file at '/tmp/x' (see https://docs.host/page.html).",
        "host:/export/a.csv",
        "kafka://BROKER:PORT/TOPIC?group=NAME",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert str(Url(text)) == text
    assert shown(text) == text


@pytest.mark.parametrize("end", ["`", "`, or", ").", ";", "`). Then"])
def test_what_ends_a_sentence_is_not_of_its_url(end: str) -> None:
    text = f"give (`api=http://127.0.0.1:8001{end}"
    assert shown(text) == text
    hidden = shown(f"give (`api=http://{SECRET}:word{end}")
    assert SECRET not in hidden and hidden.endswith(end)


def test_every_error_and_warning() -> None:
    text = f"no file at s3://key:{SECRET}@bucket/a: https://h/a?sig={SECRET}"
    for name in errors.__all__:
        assert SECRET not in all_of(getattr(errors, name)(text))
    with pytest.warns(UserWarning, match="no file") as found:
        warn(text)
    assert SECRET not in str(found[0].message)


# ---- options ---------------------------------------------------------------


@every_form
def test_options(url: str) -> None:
    for config in (
        options_of(
            {"data": url, "eval_data": url, "save": url, "curves": url}
        ),
        FeedConfig(data=url, eval_data=url, job="job"),
    ):
        assert SECRET not in f"{config} {config!r}"
    options = options_of({"data": url, "eval_data": url}).options()
    assert SECRET not in str(options)
    assert {type(value) for value in options.values()} <= {
        *(str, int, float, bool)
    }


@every_form
def test_a_checkpoint_keeps_none(url: str) -> None:
    """Where something is missing that decides what is read, it says so."""
    config = options_of(options_of({"data": url}).options())
    if MARK in str(config.data):
        trained = Trained(None, None, config, None)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="`data"):
            trained.held_out()


@every_form
def test_loaders_get_urls_in_the_environment(url: str) -> None:
    for words in (
        ["--data", url, "--follow"],
        [f"--data={url}", "--samples", "5"],
        [url],
        ["--follow", url],
    ):
        arguments, variables = hidden(words)
        assert SECRET not in " ".join(arguments)
        assert variables == {"PERSIA_FEED_DATA": url}


SECRETS = ("token", "token_file", "tls_key", "admin_token_file")


@pytest.mark.parametrize("kind", [ServeConfig, WorkerConfig])
@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(
    "value", [int("9" * 12 + "1"), ["9999999999991"], {"9999999999991": 1}]
)
def test_validation_shows_no_secret(
    kind: Any, name: str, value: object
) -> None:
    if name not in kind.model_fields:
        return
    with pytest.raises(errors.InvalidArgument) as info:
        validated(kind, {name: value})
    assert "9999999999991" not in all_of(info.value)
    assert name in str(info.value)
    made = kind(token=SECRET)
    assert SECRET not in f"{made} {made!r}"
    assert made.security().token == SECRET


@pytest.mark.parametrize(
    "line",
    [
        'token: "{}',
        "token: *{}",
        "token: !{} x",
        "token: {}: x",
        "a\n{}",
        "token: @{}",
    ],
)
def test_a_file_that_is_no_yaml(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(form(line))
    with pytest.raises(errors.InvalidArgument) as info:
        read_yaml(file)
    assert SECRET not in all_of(info.value)


@pytest.mark.parametrize("url", [*map(form, FORMS[:12:3])], ids=range(4))
@pytest.mark.parametrize(
    "words",
    [
        "train DATA more",
        "train --data DATA DATA",
        "train --epochs DATA",
        "train DATA --dim 0",
        "serve ps --port DATA",
        "prepare DATA out",
        "feed DATA --loader 1/1",
        "status DATA",
        "plan DATA",
        "rows get t DATA",
    ],
)
def test_wrong_commands(url: str, words: str) -> None:
    command = [word.replace("DATA", url) for word in words.split()]
    done = typer.testing.CliRunner().invoke(app, command)
    assert done.exit_code
    assert SECRET not in done.output
    if isinstance(done.exception, errors.PersiaError):
        assert SECRET not in all_of(done.exception)


def test_addresses() -> None:
    for address in (f"{SECRET}@host:80", f"grpc://me:{SECRET}@host:80"):
        with pytest.raises(errors.InvalidArgument) as info:
            resolve(address, Security())
        assert SECRET not in all_of(info.value)
    (found,) = ask_trainers([f"http://me:{SECRET}@127.0.0.1:1/x"], 5.0)
    assert found.error and SECRET not in f"{found}"


def test_pem_in_the_place_of_its_file() -> None:
    job = one_job()
    assert job.key and job.cert
    with pytest.raises(errors.InvalidArgument) as info:
        Security.load(cert=job.cert, key=job.key)
    assert job.key.splitlines()[1] not in all_of(info.value)
    assert job.key not in repr(job) and f"{job.token}" not in repr(job)


def test_settings_of_brokers() -> None:
    pytest.importorskip("confluent_kafka")
    source = Kafka(
        *("127.0.0.1:1", "clicks", "group", "avazu"),
        config={"sasl.password": SECRET},
        timeout=0.2,
    )
    assert SECRET not in repr(source) + repr(vars(source))
    with pytest.raises(errors.PersiaError) as info:
        next(iter(source))
    assert SECRET not in all_of(info.value)


def test_the_arguments_of_this_process(tmp_path: Path) -> None:
    before = Path("/proc/self/cmdline").read_bytes()
    hide_secrets()  # pytest has none
    assert Path("/proc/self/cmdline").read_bytes() == before


# ---- libraries whose errors show URLs --------------------------------------


class Showing(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system whose errors have the whole URL, as those of aiohttp.

    Attributes:
        fails: the call that fails.
        kind: what it raises.
    """

    protocol = "showing"
    cachable = False
    fails = "info"
    kind: type[Exception] = RuntimeError

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _fail(self, call: str, path: str) -> None:
        if self.fails == call:
            try:
                raise KeyError(path)
            except KeyError as error:
                raise self.kind(
                    f"403, message='Forbidden', url={path!r}"
                ) from error

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._fail("info", path)
        return {"name": path, "size": 1000, "type": "file"}

    def isdir(self, path: str) -> bool:
        return False

    def exists(self, path: str, **_: Any) -> bool:
        return True

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        self._fail("open", path)
        return ShowingFile(self, path)


class ShowingFile:
    closed = False

    def __init__(self, system: Showing, path: str) -> None:
        self._system, self._path = system, path

    def read(self, n: int = -1) -> bytes:
        self._system._fail("read", self._path)
        return b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def tell(self) -> int:
        return 0

    def seek(self, *_: int) -> int:
        self._system._fail("read", self._path)
        return 0

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def showing() -> None:
    fsspec.register_implementation("showing", Showing, clobber=True)


@pytest.mark.usefixtures("showing")
@pytest.mark.parametrize("call", ["info", "open", "read"])
@pytest.mark.parametrize(
    "kind", [RuntimeError, FileNotFoundError, ValueError, OSError]
)
@pytest.mark.parametrize(
    "end", ["csv", "parquet", "jsonl", "arrow", "csv.gz", "tfrecord"]
)
def test_errors_of_a_file_system(
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    kind: type[Exception],
    end: str,
) -> None:
    monkeypatch.setattr(Showing, "fails", call)
    monkeypatch.setattr(Showing, "kind", kind)
    url = form(f"showing://me:{{}}@host/a.{end}")
    with pytest.raises(errors.PersiaError) as info:
        for _ in Files(url, batch_size=2):
            pass
    assert SECRET not in all_of(info.value)


@pytest.mark.usefixtures("showing")
@pytest.mark.parametrize("prefix", ["", "avazu:"])
def test_what_is_opened_is_whole(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """A file system gets all of the URL."""
    asked: list[str] = []
    monkeypatch.setattr(Showing, "_fail", lambda _, call, at: asked.append(at))
    url = form("showing://me:{}@host/a.csv")
    for config in (
        options_of({"data": prefix + url}),
        options_of({"data": options_of({"data": prefix + url}).data}),
        FeedConfig(data=prefix + url),
    ):
        asked.clear()
        with contextlib.suppress(errors.PersiaError):
            open_data(options_of({"data": config.data}))
        assert asked and set(asked) == {url}


def test_a_cause_without_a_secret_stays() -> None:
    plain = OSError("no route")
    assert clean(plain) is plain
    plain.__cause__ = ValueError(form("https://h/a?sig={}"))
    assert clean(plain) is None
