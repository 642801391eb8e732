"""What a process that serves models says of them, over whatever protocol it is
asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.base.version import __version__
from persia.errors import InvalidArgument, ProtocolError
from persia.serving.form import TensorForm
from persia.serving.inputs import inputs_of, outputs_of
from persia.serving.repository import Repository

_EXTENSIONS = [
    *("binary_tensor_data", "model_configuration"),
    *("model_repository", "statistics"),
]
PLATFORM = "persia_export"


class Service:
    """The questions of the protocol, as dicts of its names.

    Args:
        repository: the models.
        shared: whether other processes have the same models and port. Then
            no request chooses versions: it reaches one process alone.

    Attributes:
        repository: the models.
        ready: whether new requests are welcome.
    """

    def __init__(self, repository: Repository, shared: bool = False) -> None:
        self.repository = repository
        self._shared = shared
        self.ready = True

    @property
    def is_ready(self) -> bool:
        """All models answer, and the server does not end."""
        return self.ready and self.repository.is_ready

    def about(self) -> dict[str, Any]:
        """The server."""
        return {
            "name": "persia",
            "version": __version__,
            "extensions": _EXTENSIONS,
        }

    def model_is_ready(self, name: str, version: str) -> bool:
        """The model, or its version, answers."""
        model = self.repository.model(name)
        ready = self.ready and model.is_ready
        return ready and (not version or version in model.names())

    def model_about(self, name: str, version: str) -> dict[str, Any]:
        """Inputs and outputs."""
        found = self.repository.find(name, version)
        inputs = inputs_of(found.schema, found.form)
        return {
            "name": name,
            "versions": self.repository.model(name).names(),
            "platform": PLATFORM,
            "inputs": [_about(one) for one in inputs],
            "outputs": [_about(one) for one in outputs_of(found.manifest)],
            "parameters": {"version": found.version},
        }

    def config(self, name: str, version: str) -> dict[str, Any]:
        """Inputs and outputs, as Triton's clients that measure ask for
        them."""
        found = self.repository.find(name, version)
        inputs = inputs_of(found.schema, found.form)
        return {
            "name": name,
            "platform": PLATFORM,
            "max_batch_size": 0,
            "input": [_configured(one) for one in inputs],
            "output": [_configured(one) for one in outputs_of(found.manifest)],
        }

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """Requests of a version and their time, ids that were looked up, and
        those of them without a row."""
        found = self.repository.find(name, version)
        ids, unknown = found.unknown()
        return {
            "name": name,
            "version": found.version,
            **found.statistics.document(),
            "ids": ids,
            "unknown_ids": unknown,
            "lag": found.lag,
            "packets": found.packets,
        }

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """All models, with all versions; or with those that answer."""
        out = []
        for model in self.repository.models.values():
            now = model.current.version if model.is_ready else ""
            for name in model.names():
                state = "READY" if name == now else "AVAILABLE"
                if ready and name != now:
                    continue
                out.append(
                    {"name": model.name, "version": name, "state": state}
                )
        return out

    def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Makes a version the one that answers.

        Args:
            name: of the model.
            parameters: of the request: ``version``, or nothing for the
                current one.

        Raises:
            InvalidArgument: there are several processes, or other
                parameters.
            ProtocolError: the version is no text.
        """
        self._check_alone()
        others = sorted(set(parameters) - {"version"})
        if others:  # Triton's: another configuration, or files of a model
            raise InvalidArgument(
                f"a load has no parameters {others[:4]}: it takes `version`"
            )
        version = parameters.get("version")
        if version is not None and not isinstance(version, str):
            raise ProtocolError("the version is no string")
        self.repository.model(name).load(version, version is not None)

    def unload(self, name: str) -> None:
        """A model answers no more.

        Raises:
            InvalidArgument: there are several processes.
        """
        self._check_alone()
        self.repository.model(name).unload()

    def _check_alone(self) -> None:
        if self._shared:
            raise InvalidArgument(
                "several processes serve this port, and a request reaches one "
                "of them: choose a version for all by `persia model use`"
            )


def _configured(one: TensorForm) -> dict[str, Any]:
    kind = "STRING" if one.datatype == "BYTES" else one.datatype
    return {"name": one.name, "data_type": f"TYPE_{kind}", "dims": one.shape}


def _about(one: TensorForm) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": one.shape}
