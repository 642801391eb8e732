# The C core: csrc/py. Buffers are any object with the buffer protocol.
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy.typing as npt
from typing_extensions import Buffer as _Buffer

Buffer = _Buffer | npt.NDArray[Any]

# --- csrc/py/core.c ---

def poll() -> None: ...
def take_raised() -> BaseException | None: ...
def error_names() -> tuple[str, ...]: ...
def check_score(text: str, /) -> None: ...
def keep_memory(bytes: int, /) -> bool: ...

# --- csrc/py/store.c ---

FP32: int
BF16: int
INT8: int
INIT_UNIFORM: int
INIT_NORMAL: int
INIT_CONSTANT: int
FULL_RAISE: int
MISSING_INIT: int
MISSING_ZEROS: int
NONFINITE_RAISE: int
NONFINITE_SKIP: int
POOL_SUM: int
POOL_MEAN: int
POOL_SQRTN: int
POOL_NONE: int
PLAN_BAGS: int
PLAN_ROWS: int
TABLE_OPTIONS: dict[str, tuple[str, ...]]
DROPPED: str
HYPER_PARAMETERS: dict[str, tuple[str, ...]]
TABLE_COUNTERS: dict[str, tuple[str, ...]]

@final
class Store:
    handle: int
    def __init__(
        self,
        threads: int,
        memory_limit: int,
        remote: dict[str, Any] | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    def declare(
        self,
        name: str,
        seed: int,
        dim: int,
        dtype: int,
        optimizer: int,
        momentum: int,
        init: int,
        init_a: float,
        init_b: float,
        state_init: float,
        missing: int,
        nonfinite: int,
        capacity: int,
        full: int,
        admission: float,
        evict_updates: int,
        evict_seconds: int,
        evict_score: str,
        admit: int,
        sightings: int,
        sightings_kept: int,
    ) -> tuple[int, bool]: ...
    def plan(
        self,
        kind: int,
        keys: int,
        features: list[tuple[str, int, int, int, int]],
        /,
    ) -> int: ...
    def plan_shape(self, plan: int, /) -> tuple[int, int, int]: ...
    def apply(
        self,
        groups: list[dict[str, Any]],
        scales: list[float] | None,
        all: bool,
        /,
    ) -> None: ...
    def flush(self, seconds: float | None, /) -> None: ...
    def settle(self) -> None: ...
    def drop_error(self) -> None: ...
    def finish(self) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...
    def held(self, all: bool, /) -> int: ...
    def discard(self, which: bool | Buffer, /) -> int: ...
    def forget(self) -> None: ...
    def finite(self) -> bytes: ...
    def sums(self) -> tuple[bool, list[tuple[int, int, bytes, bytes]]]: ...
    def updates(self) -> int: ...
    def t(self) -> int: ...
    def set_t(self, base: int, /) -> None: ...
    def stats(self, table: int, /) -> dict[str, int]: ...
    def look(self) -> None: ...
    def check_lost(self) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def state_floats(self, table: int, /) -> int: ...
    def get(
        self,
        table: int,
        ids: Buffer,
        vectors: Buffer,
        state: Buffer | None,
        found: Buffer | None = None,
        /,
    ) -> None: ...
    def set(
        self,
        table: int,
        ids: Buffer,
        vectors: Buffer,
        state: Buffer | None,
        /,
    ) -> None: ...
    def erase(self, table: int, ids: Buffer, /) -> int: ...
    def clear(self, table: int, /) -> None: ...
    def drop(self, table: int, /) -> None: ...
    def ids(self, table: int, /) -> bytes: ...

# --- csrc/py/changes.c ---

CHANGES_NEXT: int
CHANGES_BEGIN: int
CHANGES_END: int
CHANGES_COUNT: int

def changes(
    handle: int,
    table: int,
    shard: int,
    verb: int,
    reader: int,
    piece: int,
    room: int,
    type: int,
    /,
) -> tuple[bytes, bytes, bytes, bool, bool, bool, int]: ...

# --- csrc/py/data.c ---

def value_hash(value: Buffer, salt: int = 0, /) -> int: ...
def strings_hash(
    offsets: Buffer,
    bytes: Buffer | None,
    first: int,
    n: int,
    wide: bool,
    strip: bool,
    salt: int,
    ids: Buffer,
    /,
) -> None: ...
def strings_split(
    offsets: Buffer,
    bytes: Buffer | None,
    first: int,
    n: int,
    wide: bool,
    strip: bool,
    separator: bytes,
    salt: int,
    ids: Buffer,
    lengths: Buffer,
    /,
) -> int: ...
def json_lines(text: Buffer, most: int, /) -> tuple[int, int, int]: ...
def lines_skip(
    text: Buffer, final: bool, lines: int, /
) -> tuple[int, int]: ...

@final
class CriteoReader:
    lines: int
    faults: int
    def __init__(self, has_label: bool, salts: tuple[int, ...], /) -> None: ...
    def read(
        self,
        text: Buffer,
        final: bool,
        n: int,
        room: int,
        label: Buffer | None,
        integers: Buffer,
        ids: Buffer,
        /,
    ) -> tuple[int, int]: ...
    def take_faults(self) -> list[tuple[int, int, int]]: ...
    def pass_lines(self, n: int, /) -> None: ...

@final
class Synth:
    def __init__(
        self,
        *,
        seed: int = ...,
        singles: int = ...,
        multis: int = ...,
        max_length: int = ...,
        dense: int = ...,
        vocabulary: int = ...,
        zipf: float = ...,
        ctr: float = ...,
        signal: float = ...,
    ) -> None: ...
    def ids_room(self, n: int, /) -> int: ...
    def read(
        self,
        first: int,
        n: int,
        label: Buffer,
        logit: Buffer | None,
        dense: Buffer,
        ids: Buffer,
        lengths: Buffer,
        /,
    ) -> int: ...

# --- csrc/py/prefetch.c ---

def prefetch_open(handle: int, staleness: int, here: bool, /) -> int: ...
def prefetch_close(handle: int, stream: int, /) -> None: ...
def prefetch_number() -> int: ...
def prefetch_batch(handle: int, stream: int, number: int, /) -> None: ...
def prefetch_ready(handle: int, number: int, /) -> None: ...
def prefetch_next(handle: int, number: int, reading: bool, /) -> None: ...
def prefetch_skip(handle: int, number: int, /) -> None: ...
def prefetch_flush(handle: int, /) -> None: ...
def prefetch_stats(handle: int, /) -> dict[str, Any]: ...

# --- csrc/py/cluster.c ---

def cluster_join(handle: int, /) -> int: ...
def cluster_sync(handle: int, last: int, rank: int, world: int, /) -> None: ...
def cluster_sync_stream(
    handle: int, stream: int, by_batch: bool, /
) -> None: ...
def cluster_take_plain(handle: int, /) -> bool: ...
def cluster_leave(handle: int, settle: bool, /) -> None: ...
def cluster_held(handle: int, /) -> float: ...
def cluster_counts(handle: int, /) -> dict[str, int]: ...
def cluster_stats(handle: int, shard: int, /) -> dict[str, Any]: ...
def cluster_repair(handle: int, shard: int, /) -> None: ...
def cluster_inherit(
    handle: int, stream: int, rank: int, timeout: float, /
) -> bool: ...
def cluster_tell_lost(handle: int, /) -> None: ...
def cluster_shard(handle: int, id: int, /) -> int: ...

# --- csrc/py/ckpt.c ---

def ckpt_tables(handle: int, /) -> list[dict[str, Any]]: ...
def ckpt_describe(**config: Any) -> dict[str, Any]: ...
def ckpt_shards(handle: int, /) -> list[str]: ...
def ckpt_hello(
    handle: int, shard: int, namespace: str, stream: int, /
) -> dict[str, Any]: ...
def ckpt_snapshot(
    handle: int, shard: int, verb: int, root: str, folder: str, proof: str, /
) -> dict[str, Any]: ...
def ckpt_restore(
    handle: int,
    shard: int,
    verb: int,
    root: str,
    folder: str,
    proof: str,
    lineage: int,
    restore: int,
    updates: int,
    step: int,
    t: int,
    pushes: Sequence[int],
    ledgers: Sequence[_Ledger],
    files: Sequence[_ShardFile],
    /,
) -> dict[str, int]: ...
def ckpt_greet(handle: int, restored: bool, /) -> None: ...
def ckpt_loading(handle: int, loading: bool, /) -> None: ...
def ckpt_go_on(
    handle: int, stream: int, number: int, lost: int, /
) -> None: ...
def ckpt_place(handle: int, /) -> int | None: ...
def ckpt_crc(data: Buffer, crc: int = 0, /) -> int: ...
def ckpt_file_crc(folder: int, name: str, /) -> tuple[int, int]: ...

# --- csrc/py/times.c, csrc/py/peer.c, csrc/py/server.c ---

CALL_BOUNDS: tuple[float, ...]  # seconds
Calls = tuple[tuple[int, ...], float, int, int]
ROLES: list[str]
METHODS: dict[str, list[str]]  # by path: the roles that may call it
Denied = dict[tuple[str, str], int]  # by reason and role

def renew_security(security: dict[str, Any], /) -> int: ...
def check_tokens(text: str, /) -> None: ...
def security_users(source: int, /) -> int: ...
def peers() -> list[tuple[str, str, bool]]: ...

@final
class Pass: ...

@final
class Gate:
    def __new__(
        cls,
        security: dict[str, Any],
        service: str = ...,
        lines: int = 0,
        lines_json: bool = False,
        audit: int = 0,
    ) -> Gate: ...
    def enter(self, method: str, header: str | None, peer: str, /) -> Pass: ...
    def denied(self) -> Denied: ...
    def close(self) -> None: ...

# --- csrc/py/traces.c ---

# Kind; trace (high, low), its own id, that above it (0: none); error; when it
# began and ended, in ns of time.monotonic_ns(); stream and number of the
# batch, attempt, shard, rows, bytes (0: not known).
Span = tuple[
    str,
    int,
    int,
    int,
    int,
    str | None,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
]

def trace_start(rate: float, room: int, /) -> None: ...
def trace_take() -> tuple[list[Span], int]: ...

GRPC: str  # version of the gRPC library, or "none"
GRPC_HOLES: str  # its published holes; "": none is known
MESSAGE_LIMIT: int  # bytes of a message, unless an option says otherwise
SNAPSHOT_BEGIN: int
SNAPSHOT_STATUS: int
SNAPSHOT_END: int
RESTORE_PREPARE: int
RESTORE_COMMIT: int
RESTORE_ABORT: int
MOVE_BEGIN: int
MOVE_STATUS: int
MOVE_CANCEL: int
MOVE_PLACE: int
MOVE_PREPARE: int
MOVE_COMMIT: int
MOVE_ABORT: int
MOVE_REVIVE: int
MOVED_NONE: int
MOVED_RUNNING: int
MOVED_DONE: int
MOVED_FAILED: int

_Ledger = tuple[int, int, bytes, int, int]  # see manifests.Numbers
_ShardFile = tuple[int, str, int, int, int]  # table and a _RowFile

@final
class Channel:
    address: str
    def __init__(
        self,
        address: str,
        security: dict[str, Any],
        timeout: float,
        shard: int = -1,
    ) -> None: ...
    def hello(self, namespace: str, stream: int, /) -> dict[str, Any]: ...
    def declare(self, **config: Any) -> tuple[int, bool]: ...
    def slow(self) -> list[tuple[str, float, int, int, int, str]]: ...
    def stats(self) -> dict[str, Any]: ...
    def snapshot(
        self, verb: int, root: str, folder: str, proof: str, /
    ) -> dict[str, Any]: ...
    def move(
        self,
        verb: int,
        namespace: str,
        shard: int,
        shards: int,
        id: int,
        address: str,
        by: str,
        boot: int = 0,
        lineage: int = 0,
        durable: int = 0,
        part: int = 0,
        server: Server | None = None,
        /,
    ) -> dict[str, Any]: ...
    def restore(
        self,
        verb: int,
        root: str,
        folder: str,
        proof: str,
        lineage: int,
        restore: int,
        updates: int,
        step: int,
        t: int,
        pushes: Sequence[int],
        ledgers: Sequence[_Ledger],
        files: Sequence[_ShardFile],
        /,
    ) -> dict[str, int]: ...
    def close(self) -> None: ...

LOG_PROCESS: int
LOG_DISK: int

def log_read(
    path: str,
    position: int,
    fn: Callable[[str, int, int, int, int, str, int, str], None],
    /,
) -> tuple[dict[str, int], tuple[str, int, int]]: ...

@final
class Server:
    port: int
    def __init__(
        self,
        namespace: str,
        shard: int,
        shards: int,
        threads: int,
        memory_limit: int,
        lineage: int,
        message_limit: int,
        checkpoints: str | None,
        lines: int = 0,
        log: tuple[str, int, int, int] | None = None,
        beside: Server | None = None,
        others: int = 0,
        boot: int = 0,
        far: Callable[[str, str, str, int], object] | None = None,
        lines_json: bool = False,
        audit: int = 0,
        slow: float = 0.0,
    ) -> None: ...
    def start(
        self,
        address: str,
        threads: int,
        calls: int,
        connections: int,
        message_limit: int,
        security: dict[str, Any],
        beside: list[Server] | None = None,
        room: int = 0,
    ) -> int: ...
    def move_next(
        self, seconds: float, /
    ) -> tuple[object, dict[str, Any]] | None: ...
    def move_give(
        self,
        call: object,
        error: str,
        text: str,
        state: int,
        shard: int,
        id: int,
        rows: int,
        by: str,
        shards: int,
        here: list[int],
        /,
    ) -> None: ...
    def add(self, server: Server, /) -> None: ...
    def remove(
        self, server: Server, address: str | None, move: int, /
    ) -> None: ...
    def place(self, shard: int, address: str, move: int, /) -> None: ...
    def hold(self, how: int, /) -> None: ...
    def begun(self) -> int: ...
    def steps(self) -> list[int]: ...
    def set_steps(self, numbers: list[int], /) -> None: ...
    def copy_begin(self) -> None: ...
    def copy_next(self, last: bool, /) -> int | None: ...
    def copy_left(self) -> int: ...
    def copy_end(self) -> None: ...
    def arrive(self, call: object, /) -> bool: ...
    def reborn(self) -> None: ...
    def connections(self) -> tuple[int, int]: ...
    def denied(self) -> Denied: ...
    def waits(self) -> tuple[float, float]: ...
    def calls(self) -> dict[str, Calls]: ...
    def snapshot(self) -> tuple[int, int, bool]: ...
    def health(self, serving: bool, /) -> None: ...
    def stop(self, grace: float, /) -> None: ...
    def checkpoints(self, path: str, /) -> None: ...
    def replay(self, position: int, /) -> dict[str, int]: ...
    def ready(self) -> None: ...
    def log_counts(self) -> dict[str, int]: ...
    def log_release(self, position: int, /) -> None: ...
    def channel(self, timeout: float, /) -> Channel: ...
    def close(self) -> None: ...

# --- csrc/py/roles.c, csrc/py/sender.c ---

@final
class EmbeddingWorker:
    def __init__(
        self,
        servers: dict[str, Any],
        threads: int,
        message_limit: int,
        queue_limit: int,
        lease: float,
        silence: float,
        loaders: int,
        lines: int = 0,
        lines_json: bool = False,
        audit: int = 0,
    ) -> None: ...
    def start(
        self,
        address: str,
        threads: int,
        calls: int,
        connections: int,
        message_limit: int,
        security: dict[str, Any],
    ) -> int: ...
    def stop(self, grace: float, /) -> None: ...
    def leave(self) -> int: ...
    def interrupt(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def calls(self) -> dict[str, Calls]: ...
    def denied(self) -> Denied: ...
    def close(self) -> None: ...

@final
class Taken(_Buffer):
    samples: int
    end: bool
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def lookup(self, handle: int, batch: int, /) -> None: ...
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int, int]]: ...
    def places(
        self, features: int, /
    ) -> tuple[bytearray, bytearray, bytearray | None]: ...
    def use(self) -> None: ...
    def skip(self) -> None: ...
    def give_back(self) -> None: ...

@final
class Rank:
    def __init__(self, config: dict[str, Any]) -> None: ...
    def declare(
        self,
        tables: list[dict[str, Any]],
        features: list[tuple[str, int, int, bool, bool]],
        ordered: bool,
        /,
    ) -> None: ...
    def next(self) -> Taken: ...
    def counts(self) -> dict[str, int]: ...
    def cancel(self) -> None: ...
    def again(self) -> None: ...
    def set_workers(self, config: dict[str, Any], /) -> None: ...

def worker_stats(config: dict[str, Any], /) -> dict[str, int]: ...
def taken_wait(handle: int, batch: int, /) -> None: ...

@final
class Sender:
    def __init__(self, config: dict[str, Any]) -> None: ...
    def send(
        self,
        samples: int,
        names: list[str],
        ids: Buffer,
        offsets: Buffer | None,
        weights: Buffer | None,
        tensors: list[tuple[str, str, tuple[int, ...], Buffer]],
        /,
    ) -> None: ...
    def end(self) -> None: ...
    def flush(self, timeout: float, /) -> None: ...
    def claim(self, epochs: int, /) -> int: ...
    def skip(self, number: int, /) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def set_workers(self, config: dict[str, Any], /) -> None: ...
    def close(self, leaves: bool, /) -> None: ...

# --- csrc/py/rows_file.c ---

ROWS_FP32: int
ROWS_FP16: int
ROWS_INT8: int
ROWS_INT4: int

@final
class RowsWriter:
    def __new__(
        cls,
        folder: int,
        name: str,
        type: int,
        dim: int,
        key: int,
        rows: int,
        metadata: str,
        /,
    ) -> RowsWriter: ...
    def add(self, ids: Buffer, vectors: Buffer, /) -> None: ...
    def finish(self) -> None: ...

@final
class RowsFile:
    rows: int
    def __new__(
        cls,
        folder: int,
        name: str,
        type: int,
        dim: int,
        key: int,
        absent: dict[str, Any],
        /,
    ) -> RowsFile: ...
    fresh: int
    def apply(self, gone: Buffer, rows: Buffer, /) -> None: ...
    def limit(self, bytes: int, /) -> None: ...
    def look_up(self, ids: Buffer, out: Buffer, /) -> int: ...
    def contains(self, ids: Buffer, out: Buffer, /) -> None: ...
    def read(self, first: int, ids: Buffer, vectors: Buffer, /) -> None: ...
    def check(self) -> None: ...

def rows_stride(type: int, dim: int, /) -> int: ...
def rows_batch(
    parts: list[tuple[RowsFile, int, int, int]],
    features: int,
    ids: Buffer,
    offsets: Buffer | None,
    weights: Buffer | None,
    out: Buffer,
    width: int,
    /,
) -> tuple[int, int]: ...

@final
class InferPlan:
    def __new__(
        cls, inputs: list[tuple[str, str, Sequence[int]]], /
    ) -> InferPlan: ...

@final
class InferRequest:
    model: str
    version: str
    outputs: list[str] | None
    owner: Any
    method: str
    traceparent: str
    waited: float
    late: bool
    def __new__(
        cls,
        model: str,
        version: str,
        tensors: list[tuple[str, str, Sequence[int], Buffer]],
        owner: Any,
    ) -> InferRequest: ...
    def bind(self, plan: InferPlan, limit: int, /) -> int: ...
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], bytes]]: ...
    def message(self) -> bytes: ...
    def reply(
        self,
        version: str,
        outputs: list[tuple[str, str, Sequence[int], Buffer]],
        /,
    ) -> None: ...
    def reply_message(self, message: bytes, /) -> None: ...
    def fail(self, code: str, text: str, /) -> None: ...

@final
class InferQueue:
    waiting: int
    refused: dict[str, int]
    def __new__(cls, room: int, timeout: float, /) -> InferQueue: ...
    def listen(
        self,
        address: str,
        threads: int,
        calls: int,
        connections: int,
        message_limit: int,
        shared: bool,
        security: dict[str, Any],
        lines: int = 0,
        lines_json: bool = False,
        audit: int = 0,
    ) -> int: ...
    def health(self, serving: bool, /) -> None: ...
    def denied(self) -> Denied: ...
    def put(self, request: InferRequest, timeout: float, /) -> None: ...
    def take(self, samples: int, /) -> list[InferRequest]: ...
    def take_other(self) -> InferRequest | None: ...
    def stop(self, grace: float, /) -> None: ...
    def close(self) -> None: ...

def thread_prompt() -> None: ...
def infer_gather(
    requests: list[InferRequest], first: int, count: int, out: Buffer, /
) -> None: ...
