"""Getting data to the coordinator: upload with progress, by path, or a dataset that is there; and waiting until it is ingested."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..client import ApiError, Client, Dataset, DatasetOptions
from ..contracts.errors import ErrorCode, RequestError
from .output import Out
from .units import size

DATASET_ID = re.compile(r"ds-[0-9a-f]{16}")
SHOWN_ABOVE = 8 << 20  # bytes; a smaller upload is over before a bar is read
SAY_EVERY_S = 5.0


def dataset_of(
    client: Client,
    data: Sequence[str],
    out: Out,
    options: DatasetOptions,
    *,
    by_path: bool = False,
    shuffle: int | None = None,
    resume: str | None = None,
) -> Dataset:
    """The ready dataset that ``data`` names: files (uploaded, or on the coordinator's host ``by_path``), or one dataset id.

    Raises StatetapError, naming the file.
    """
    if len(data) == 1 and DATASET_ID.fullmatch(data[0]) and not Path(data[0]).exists():
        if shuffle is not None:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"--shuffle: {data[0]} is a dataset already",
                next_step="Give the files to shuffle, not the dataset's id.",
            )
        return client.wait_for_dataset(data[0], progress=_ingestion(out))
    paths = [Path(d) for d in data]
    if by_path:
        dataset = client.dataset_from_path(*[p.resolve() for p in paths], shuffle=shuffle, **options)
    else:
        missing = [str(p) for p in paths if not p.is_file()]
        if missing:
            raise RequestError(
                ErrorCode.NOT_FOUND, f"{missing[0]} is not a file", next_step="Name dataset files that exist, or a dataset's id."
            )
        with _bytes_sent(out, sum(p.stat().st_size for p in paths)) as progress:
            dataset = _uploaded(client, paths, options, shuffle, progress, resume, out)
    return client.wait_for_dataset(dataset.dataset_id, progress=_ingestion(out))


def _uploaded(
    client: Client,
    paths: list[Path],
    options: DatasetOptions,
    shuffle: int | None,
    progress: Callable[[int, int], None] | None,
    resume: str | None,
    out: Out,
) -> Dataset:
    def started(upload_id: str) -> None:
        if len(paths) == 1:  # said now: nobody can say it when this process is killed
            out.say(f"upload {upload_id}; if it is cut off, the same command with --resume-upload {upload_id} goes on")

    try:
        return client.upload(*paths, shuffle=shuffle, progress=progress, started=started, resume=resume, **options)
    except ApiError as e:
        if "upload_id" in e.detail and len(paths) == 1:
            e.detail["next_step"] = f"Go on where it stands: the same command with --resume-upload {e.detail['upload_id']}"
        raise


@contextmanager
def _bytes_sent(out: Out, total: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, a line every few seconds elsewhere; on stderr, since stdout may be JSON."""
    if total < SHOWN_ABOVE:
        yield None
        return
    if sys.stderr.isatty():
        columns = (TextColumn("uploading"), BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda sent, _: bar.update(task, completed=sent)
        return
    said = time.monotonic()

    def tell(sent: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            out.say(f"uploading: {size(sent)} of {size(total)}")

    yield tell


def _ingestion(out: Out) -> Callable[[Dataset], None]:
    said = time.monotonic()

    def tell(dataset: Dataset) -> None:
        nonlocal said
        if dataset.state == "ingesting" and time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            read = f"{dataset.rows:,} rows, {size(dataset.bytes_read)} of {size(dataset.bytes_total)} read"
            out.say(f"ingesting: {read}" if dataset.bytes_total else "waiting for the ingestion to begin")

    return tell
