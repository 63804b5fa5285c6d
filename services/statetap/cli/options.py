"""Options that several commands share, each written once: annotated types, and sets of them that a command takes as one record.

``@expanded`` turns a command with option sets into the flat one that typer reads.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..client import Client, DatasetOptions
from ..contracts.boundaries import split_boundaries
from ..contracts.positions import ALL, Positions
from ..engine.draft import resolve_boundaries
from .completing import complete_codes, complete_jobs
from .output import Out
from .stack import StackConfig
from .units import parse_duration, parse_size

Format = Literal["auto", "messages", "sharegpt", "tokenized"]
FinalKind = Literal["pre", "post", "both", "none"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_jobs)]
JobFolder = Annotated[Path, typer.Argument(metavar="PATH", help="A job's folder, or a store with one job.")]
Codes = Annotated[
    list[str] | None,
    typer.Option("--code", help="Only rows with this error code; several times for several.", autocompletion=complete_codes),
]
MaxFailed = Annotated[int, typer.Option("--max-failed", min=0, help="Failed and skipped rows that still count as success.")]
Model = Annotated[str, typer.Option("--model", help="Model folder or hub id; with --cpu also `tiny`, a model made on the spot.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's and the tokenizer's own code.")]
Sglang = Annotated[list[str] | None, typer.Argument(metavar="[-- SGLANG FLAGS]", help="Flags for SGLang, after --.")]
Shuffle = Annotated[int | None, typer.Option("--shuffle", metavar="SEED", help="Permute all rows by this seed.")]
ByPath = Annotated[bool, typer.Option("--path", help="Name the files under the coordinator's data folder, do not upload them.")]


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parser(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None

    return parser


def _positions(text: str) -> str:
    Positions.parse(text)
    return text


def size_option(name: str, text: str) -> Any:
    return typer.Option(name, parser=_checked(parse_size), metavar="SIZE", help=text)


def duration_option(name: str, text: str) -> Any:
    return typer.Option(name, parser=_checked(parse_duration), metavar="DURATION", help=text)


class OptionSet:
    """Base of the records whose fields are options. Subclasses are frozen, keyword-only dataclasses."""


@dataclass(frozen=True, kw_only=True)
class Api(OptionSet):
    """Where the coordinator is, and what is printed. The key is never an option, since others can read a command line."""

    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="STATETAP_URL",
            help="Root of the coordinator's API (its key: STATETAP_API_KEY).",
            show_default="http://127.0.0.1:8700",
        ),
    ] = None
    as_json: Json = False

    def client(self, patience_s: float = 2.0) -> Client:
        return Client(self.url, patience_s=patience_s)

    @property
    def out(self) -> Out:
        return Out(self.as_json)


@dataclass(frozen=True, kw_only=True)
class Rows(OptionSet):
    """How a source becomes rows."""

    format: Annotated[Format, typer.Option("--format", help="What the rows are.")] = "auto"
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Folder or hub id. Default: the model's.")] = None
    max_length: Annotated[int, typer.Option("--max-length", min=0, help="Longest row in tokens; longer ones are skipped. 0: no limit.")] = 0
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut longer rows rather than skip them.")] = False

    def dataset(self, *, tokenizer: str | None = None, trust_remote_code: bool, max_length: int) -> DatasetOptions:
        """Options of a dataset; ``tokenizer`` where none was given."""
        options: DatasetOptions = {
            "format": self.format,
            "truncate": self.truncate,
            "trust_remote_code": trust_remote_code,
            "max_length": max_length,
        }
        name = self.tokenizer or tokenizer
        return {**options, "tokenizer": local(name)} if name else options


@dataclass(frozen=True, kw_only=True)
class Kept(OptionSet):
    """What a job keeps of what its engine captures."""

    boundaries: Annotated[
        Any,  # a list, to typer, would be an option that is given several times
        typer.Option(
            "--boundaries", parser=_checked(split_boundaries), metavar="B,B,…", help="Of the captured ones, in this order. Default: all."
        ),
    ] = None
    encoding: Annotated[
        Literal["raw", "fp8", "zstd"], typer.Option("--encoding", help="How states are kept: fp8 is lossy, half of bf16; zstd is lossless.")
    ] = "raw"

    positions: Annotated[
        str,
        typer.Option(
            "--positions",
            parser=_checked(_positions),
            metavar="all|loss_mask|last:N",
            help="Keep the states of these positions only. Trainers' formats want all.",
        ),
    ] = ALL

    def asked(self) -> dict[str, Any]:
        """Fields of the request, None for a default."""
        return {
            "boundaries": self.boundaries,
            "encoding": self.encoding if self.encoding != "raw" else None,
            "positions": self.positions if self.positions != ALL else None,
        }


@dataclass(frozen=True, kw_only=True)
class Engines(OptionSet):
    """The engines and workers of a stack."""

    model: Model
    tap: Annotated[
        Path | None, typer.Option("--tap", help="Folder on a tmpfs. Default: one of its own in /dev/shm, removed at the end.")
    ] = None
    engines: Annotated[
        int, typer.Option("--engines", min=1, help="Engines; each takes --tp GPUs, a port, a tap folder and workers of its own.")
    ] = 1
    workers: Annotated[int, typer.Option("--workers", min=1, help="Workers an engine: one fills while the other drains.")] = 2
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size of an engine.")] = 1
    cpu: Annotated[bool, typer.Option("--cpu", help="Real SGLang without a GPU (small models).")] = False
    boundaries: Annotated[str, typer.Option("--boundaries", help="Comma-separated; default = [2, L//2, L-3] (EAGLE-3).")] = "default"
    draft_config: Annotated[
        Path | None, typer.Option("--draft-config", help="config.json of an EAGLE-3 drafter: its boundaries, in place of --boundaries.")
    ] = None
    final: Annotated[FinalKind, typer.Option("--final", help="Final state to capture.")] = "pre"
    trust_remote_code: Trust = False
    window: Annotated[int | None, typer.Option("--window", min=1, help="Prefills in flight a worker.")] = None

    def config(self, *, model: str, store: Path, sglang: list[str] | None, **more: Any) -> StackConfig:
        """``model`` as it is served (a folder's absolute path). Raises RequestError for boundaries that it does not have."""
        boundaries = resolve_boundaries(self.boundaries, self.draft_config, model)
        return StackConfig(
            model=model, store=store, tap=self.tap, engines=self.engines, workers_per_engine=self.workers, tp=self.tp, cpu=self.cpu,
            boundaries=boundaries, final=self.final, trust_remote_code=self.trust_remote_code, window=self.window,
            sglang=tuple(v for v in sglang or [] if v != "--"), **more,
        )  # fmt: skip


def local(name: str) -> str:
    """A folder's absolute path; a hub id stays as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every parameter that is an OptionSet replaced by that set's options."""
    hints = typing.get_type_hints(command, include_extras=True)
    sets: dict[str, Any] = {name: t for name, t in hints.items() if isinstance(t, type) and issubclass(t, OptionSet)}
    parameters: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        if given.name not in sets:
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[given.name]))
            continue
        types = typing.get_type_hints(sets[given.name], include_extras=True)
        for f in dataclasses.fields(sets[given.name]):
            default = inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
            parameters.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[f.name]))

    def flat(**values: Any) -> None:
        made = {name: cls(**{f.name: values.pop(f.name) for f in dataclasses.fields(cls)}) for name, cls in sets.items()}
        command(**values, **made)

    flat.__name__, flat.__doc__, flat.__module__ = command.__name__, command.__doc__, command.__module__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat
