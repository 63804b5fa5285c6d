"""Every error of Statetap: one base class that carries a code, a sentence for a person, the next step and ``retryable``.

Invariant: nothing reaches a user without a code of :class:`ErrorCode`; :data:`SPECS` says of each code whether trying again
can help, which HTTP status it has and what to do next. ``docs/reference/errors.md`` is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """Machine codes. Their values are part of the API and of the ledger and never change."""

    # of a row
    PROMPT_TOO_LONG = "prompt_too_long"
    EMPTY_PROMPT = "empty_prompt"
    BAD_TOKEN_ID = "bad_token_id"
    NO_SUPERVISED_TOKEN = "no_supervised_token"
    ROW_EXCEEDS_TAP = "row_exceeds_tap"
    BAD_ROW = "bad_row"
    MASK_AMBIGUOUS = "mask_ambiguous"
    # of a prefill and its capture
    ENGINE_MISMATCH = "engine_mismatch"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_REJECTED = "engine_rejected"
    CAPTURE_INCOMPLETE = "capture_incomplete"
    CAPTURE_BACKPRESSURE = "capture_backpressure"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    TAP_FULL = "tap_full"
    # of the check and the commit
    STORE_FULL = "store_full"
    STORE_IO = "store_io"
    NONFINITE_STATES = "nonfinite_states"
    ZERO_STATES = "zero_states"
    TOKEN_MISMATCH = "token_mismatch"
    SHAPE_MISMATCH = "shape_mismatch"
    WORKER_LOST = "worker_lost"
    POISONED = "poisoned"
    # of verify
    FILE_MISSING = "file_missing"
    FILE_CORRUPT = "file_corrupt"
    INCOMPLETE = "incomplete"
    # of a request to the service, a dataset or a start
    INVALID_REQUEST = "invalid_request"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    IDEMPOTENCY_IN_FLIGHT = "idempotency_in_flight"
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    RATE_LIMITED = "rate_limited"
    DATASET_NOT_READY = "dataset_not_ready"
    DATASET_FAILED = "dataset_failed"
    PATH_NOT_ALLOWED = "path_not_allowed"
    PLAN_MISMATCH = "plan_mismatch"
    REDIS_UNAVAILABLE = "redis_unavailable"
    STORE_UNAVAILABLE = "store_unavailable"
    FLAG_REFUSED = "flag_refused"
    ENGINE_START_FAILED = "engine_start_failed"
    SELF_CHECK_FAILED = "self_check_failed"
    COORDINATOR_UNREACHABLE = "coordinator_unreachable"
    INTERNAL = "internal"


@dataclass(frozen=True, kw_only=True)
class ErrorSpec:
    """What holds of a code wherever it appears."""

    retryable: bool
    status: int
    next_step: str


SPECS: dict[ErrorCode, ErrorSpec] = {
    ErrorCode.PROMPT_TOO_LONG: ErrorSpec(
        retryable=False, status=422, next_step="Shorten the row, or start an engine with a longer context."
    ),
    ErrorCode.EMPTY_PROMPT: ErrorSpec(retryable=False, status=422, next_step="Give the row at least one token, or drop it."),
    ErrorCode.BAD_TOKEN_ID: ErrorSpec(
        retryable=False, status=422, next_step="Tokenise with the tokenizer of the model that the engine serves."
    ),
    ErrorCode.NO_SUPERVISED_TOKEN: ErrorSpec(
        retryable=False, status=422, next_step="Give the row an assistant turn, or a longer max_length so that one is kept."
    ),
    ErrorCode.ROW_EXCEEDS_TAP: ErrorSpec(
        retryable=False, status=422, next_step="Give the workers a larger tap (STATETAP_TAP_BYTES), or shorten the row."
    ),
    ErrorCode.BAD_ROW: ErrorSpec(retryable=False, status=422, next_step="Correct the named line of the dataset and submit it again."),
    ErrorCode.MASK_AMBIGUOUS: ErrorSpec(
        retryable=False,
        status=422,
        next_step="Use a chat template with {% generation %}, or submit tokenised rows with their own loss_mask.",
    ),
    ErrorCode.ENGINE_MISMATCH: ErrorSpec(retryable=False, status=409, next_step="Start an engine with the profile that the job names."),
    ErrorCode.ENGINE_UNREACHABLE: ErrorSpec(
        retryable=True, status=503, next_step="Look at the engine's log; the job goes on when it answers again."
    ),
    ErrorCode.ENGINE_TIMEOUT: ErrorSpec(
        retryable=True, status=504, next_step="Look at the engine's log and load; raise STATETAP_REQUEST_TIMEOUT_S for long prompts."
    ),
    ErrorCode.ENGINE_REJECTED: ErrorSpec(
        retryable=False, status=502, next_step="Read the engine's message; the row or the engine's flags have to change."
    ),
    ErrorCode.CAPTURE_INCOMPLETE: ErrorSpec(
        retryable=True, status=502, next_step="Retry the row; if it repeats, look at the engine's log."
    ),
    ErrorCode.CAPTURE_BACKPRESSURE: ErrorSpec(
        retryable=True, status=503, next_step="Retry later; lower the worker's window or raise the engine's ring budget."
    ),
    ErrorCode.PROTOCOL_MISMATCH: ErrorSpec(retryable=False, status=502, next_step="Run worker and engine from the same Statetap version."),
    ErrorCode.TAP_FULL: ErrorSpec(retryable=True, status=503, next_step="Give the tap more room; check for files that are not Statetap's."),
    ErrorCode.STORE_FULL: ErrorSpec(
        retryable=True, status=507, next_step="Free space on the store: a job goes on by itself, a dataset is submitted again."
    ),
    ErrorCode.STORE_IO: ErrorSpec(retryable=True, status=503, next_step="Look at the store's disk (dmesg, mount options), then retry."),
    ErrorCode.NONFINITE_STATES: ErrorSpec(
        retryable=True, status=502, next_step="Retry the row; if it repeats, the model overflows on it: drop it or use another dtype."
    ),
    ErrorCode.ZERO_STATES: ErrorSpec(
        retryable=True, status=502, next_step="Retry the row; if it repeats, run `statetap parity` against the engine."
    ),
    ErrorCode.TOKEN_MISMATCH: ErrorSpec(
        retryable=True, status=502, next_step="Retry the row; if it repeats, report it: the engine ran other tokens than it was sent."
    ),
    ErrorCode.SHAPE_MISMATCH: ErrorSpec(
        retryable=True,
        status=502,
        next_step="Run worker and engine from the same Statetap version; compare /v1/engines with the job's profile.",
    ),
    ErrorCode.WORKER_LOST: ErrorSpec(retryable=True, status=503, next_step="Nothing: the batch is given to another worker."),
    ErrorCode.POISONED: ErrorSpec(
        retryable=False, status=422, next_step="The row ended three workers while it was alone in flight: look at it before you retry it."
    ),
    ErrorCode.FILE_MISSING: ErrorSpec(retryable=True, status=500, next_step="Restore the file or extract the row again."),
    ErrorCode.FILE_CORRUPT: ErrorSpec(retryable=True, status=500, next_step="Extract the row again; check the disk."),
    ErrorCode.INCOMPLETE: ErrorSpec(retryable=True, status=409, next_step="Let the job end before you verify or train on it."),
    ErrorCode.INVALID_REQUEST: ErrorSpec(retryable=False, status=422, next_step="Correct the named field."),
    ErrorCode.NOT_FOUND: ErrorSpec(retryable=False, status=404, next_step="List what there is with GET on the collection."),
    ErrorCode.CONFLICT: ErrorSpec(retryable=False, status=409, next_step="Look at the present state first."),
    ErrorCode.IDEMPOTENCY_MISMATCH: ErrorSpec(
        retryable=False, status=422, next_step="Make a new Idempotency-Key for a new request; repeat the first one unchanged."
    ),
    ErrorCode.IDEMPOTENCY_IN_FLIGHT: ErrorSpec(
        retryable=True, status=409, next_step="Send the same request again in some seconds: it answers with what the first one made."
    ),
    ErrorCode.TOO_LARGE: ErrorSpec(
        retryable=False, status=413, next_step="Send less, or raise the limit named in the message (a setting of the coordinator)."
    ),
    ErrorCode.UNAUTHORIZED: ErrorSpec(
        retryable=False,
        status=401,
        next_step="Send a key as `Authorization: Bearer st_…` (STATETAP_API_KEY for the command line); `statetap keys add` makes one.",
    ),
    ErrorCode.FORBIDDEN: ErrorSpec(retryable=False, status=403, next_step="Use a key with the scope that the message names."),
    ErrorCode.RATE_LIMITED: ErrorSpec(retryable=True, status=429, next_step="Wait for the time in Retry-After, then send the right key."),
    ErrorCode.DATASET_NOT_READY: ErrorSpec(retryable=True, status=409, next_step="Wait until GET on the dataset says ready."),
    ErrorCode.DATASET_FAILED: ErrorSpec(
        retryable=False, status=409, next_step="Read the dataset's error, correct the data and submit it again."
    ),
    ErrorCode.PATH_NOT_ALLOWED: ErrorSpec(
        retryable=False,
        status=422,
        next_step="Put the file under the data folder (STATETAP_DATA_DIR) or upload it; a tokenizer also below STATETAP_MODEL_DIRS.",
    ),
    ErrorCode.PLAN_MISMATCH: ErrorSpec(
        retryable=False, status=409, next_step="The job on the store differs from this one: submit a new job."
    ),
    ErrorCode.REDIS_UNAVAILABLE: ErrorSpec(retryable=True, status=503, next_step="Start Redis or correct STATETAP_REDIS_URL."),
    ErrorCode.STORE_UNAVAILABLE: ErrorSpec(retryable=True, status=503, next_step="Mount the store or correct STATETAP_STORE."),
    ErrorCode.FLAG_REFUSED: ErrorSpec(retryable=False, status=422, next_step="Leave the named flag out."),
    ErrorCode.ENGINE_START_FAILED: ErrorSpec(
        retryable=False, status=503, next_step="Read the end of the engine's log, named in the message."
    ),
    ErrorCode.SELF_CHECK_FAILED: ErrorSpec(
        retryable=False,
        status=503,
        next_step="This model's states are not captured rightly with this SGLang: do not use it; report model and version.",
    ),
    ErrorCode.COORDINATOR_UNREACHABLE: ErrorSpec(
        retryable=True, status=503, next_step="Start it with `statetap up`, or correct --url (STATETAP_URL)."
    ),
    ErrorCode.INTERNAL: ErrorSpec(retryable=False, status=500, next_step="Report it with the log."),
}


class StatetapError(Exception):
    """Base of all errors that a user can see.

    Tree::

        StatetapError            code, message, detail
        ├── RowError             one row cannot be had (skipped, failed or to be retried)
        ├── StoreError           the store cannot keep its promises (full, read-only, corrupt)
        ├── EngineError          the engine refuses to start or does not answer
        └── RequestError         what was asked for is not possible (API, CLI)
    """

    def __init__(self, code: ErrorCode, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    @property
    def retryable(self) -> bool:
        return SPECS[self.code].retryable

    @property
    def next_step(self) -> str:
        """What to do now: the code's, or what ``detail`` says of this case."""
        return str(self.detail.get("next_step") or SPECS[self.code].next_step)

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"


class RowError(StatetapError):
    """One row cannot be had."""


class StoreError(StatetapError):
    """The store cannot keep its promises."""


class EngineError(StatetapError):
    """The engine refuses to start, or does not answer as agreed."""


class RequestError(StatetapError):
    """What was asked for is not possible."""
