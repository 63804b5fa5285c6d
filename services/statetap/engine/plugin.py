"""The entry point of ``sglang.srt.plugins``: checks every hook target and its signature, registers the hooks, and makes taps and
writers when the model is loaded.

Invariant: SGLang swallows what a plugin raises, so everything wrong here ends the process by SystemExit, after the reason was
written to ``ENGINE_FAILED.json`` in the tap. An engine whose plugin did not load never becomes READY.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import pkgutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..contracts.capture import NORM_FILE, lease_of
from ..contracts.errors import EngineError, ErrorCode, StatetapError
from . import replies
from .failure import write_failure
from .modes import check_modes, resolved
from .ring import ALIGN
from .settings import current

logger = logging.getLogger(__name__)


def fail(error: StatetapError) -> SystemExit:
    """Leave the reason where launcher and supervisor find it; the returned SystemExit is to be raised."""
    write_failure(current().tap_dir, error)
    return SystemExit(f"statetap: {error}")


class _Scheduler:
    """What this scheduler process holds once its model is loaded."""

    taps: Any = None
    writers: Any = None
    check: Any = None
    sender: Any = None


# ---------------------------------------------------------------- hooks, scheduler side
def around_load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.is_draft_worker:
        return original(runner, *args, **kwargs)
    try:
        check_modes(runner.server_args)
    except StatetapError as e:  # before the weights are read, which can take minutes
        raise fail(e) from e
    result = original(runner, *args, **kwargs)
    try:
        _attach(runner)
    except StatetapError as e:
        raise fail(e) from e
    except Exception as e:
        raise fail(EngineError(ErrorCode.ENGINE_START_FAILED, f"the taps could not be set: {e!r}")) from e
    return result


def _attach(runner: Any) -> None:
    from safetensors.torch import save_file

    from .channel import Sender
    from .model import capture_profile, decoder_stack
    from .ring import Ring
    from .selfcheck import SelfCheck
    from .taps import Taps
    from .writer import Writers

    settings = current()
    check_hooks_applied()
    note_segments()  # tqdm made one while the weights were loaded
    stack = decoder_stack(runner.model, runner.model_config.num_hidden_layers)
    profile = capture_profile(runner, stack, settings)
    if _is_writing_rank():
        _Scheduler.sender = Sender(settings.notify)
        _Scheduler.writers = Writers(settings.tap_dir, profile, _Scheduler.sender, threads=settings.writers)
    ring = Ring(settings.ring_bytes)
    check_ring(settings.ring_bytes, forward_tokens(runner.server_args), profile.bytes_per_token)
    if _Scheduler.writers is not None and str(runner.device).startswith("cuda"):
        ring.memory()  # now, and not in the first forward
    _Scheduler.taps = Taps(stack, profile, _Scheduler.writers, ring)
    _Scheduler.check = SelfCheck(_Scheduler.taps, allow_unchecked=settings.allow_unchecked)
    _Scheduler.check.arm()
    if _Scheduler.writers is not None:
        part = settings.tap_dir / f".{NORM_FILE}"
        metadata = {"variant": profile.norm.variant, "eps": repr(profile.norm.eps)}
        weight = getattr(_Scheduler.taps.norm, "weight", None)  # a norm without one is of variant "other": nobody derives with it
        tensors = {} if weight is None else {"weight": weight.data.detach().cpu().contiguous()}
        save_file(tensors, part, metadata=metadata)
        part.replace(settings.tap_dir / NORM_FILE)
        _Scheduler.sender.send({"fact": "profile", "value": profile.to_dict()})
        from .metrics import report
        from .sweep import sweep_forever

        report(_Scheduler.sender, _metrics(_Scheduler.taps, _Scheduler.writers, ring))

        threading.Thread(target=sweep_forever, args=(settings.tap_dir,), name="statetap-sweep", daemon=True).start()


def forward_tokens(server_args: Any) -> int:
    """The largest prefill forward, in tokens: a chunk, or without chunking what SGLang puts into one (a longer prompt runs alone)."""
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        value = resolved(server_args, name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def check_ring(ring_bytes: int, tokens: int, bytes_per_token: int) -> None:
    """Raises EngineError unless two forwards fit: one is written while the next one comes."""
    need = 2 * (tokens * (bytes_per_token + 4) + 4 * ALIGN)  # ids too; at most four tensors, each aligned
    if need > ring_bytes:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"STATETAP_ENGINE_RING_BYTES={ring_bytes} holds less than two forwards of {tokens} tokens of {bytes_per_token} bytes: {need} are needed",
        )


def _metrics(taps: Any, writers: Any, ring: Any) -> Callable[[], dict[str, Any]]:
    from .metrics import total

    def read() -> dict[str, Any]:
        gauges = {"open_files": writers.open_files, "ring_used_bytes": ring.used, "ring_limit_bytes": ring.limit}
        return {**total([taps.tally, *writers.tallies]), **gauges}

    return read


def _is_writing_rank() -> bool:
    try:
        from sglang.srt.runtime_context import get_parallel

        rank = get_parallel().tp_rank
    except ImportError:  # before 0.5.22
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
    return int(rank) == 0


def after_init_new(forward_batch: Any, cls: Any, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    taps = _Scheduler.taps
    if taps is None or runner.is_draft_worker or forward_batch.forward_mode.name not in ("EXTEND", "MIXED"):
        return
    from .taps import plan_of

    forward_batch.statetap_plan = plan_of(forward_batch, batch.reqs, lease_of)


def around_forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    plan = getattr(forward_batch, "statetap_plan", None)
    taps = _Scheduler.taps
    if plan is None or taps is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    input_ids = forward_batch.input_ids
    taps.begin(plan, input_ids.device, runner.dtype)
    try:
        out = original(runner, forward_batch, *args, **kwargs)
    except BaseException:
        taps.abandon()
        raise
    taps.end(input_ids)
    check = _Scheduler.check
    if check is not None and check.result is not None:
        _Scheduler.check = None
        if _Scheduler.sender is not None:
            _Scheduler.sender.send({"fact": "self_check", "value": check.result})
    return out


def before_abort(scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    writers = _Scheduler.writers
    if writers is None:
        return
    if recv_req.abort_all:
        writers.drop_all()
    elif lease_of(recv_req.rid) is not None:
        writers.drop(recv_req.rid)


def after_port_args(result: Any, *args: Any, **kwargs: Any) -> None:
    """Leave the instance id in the temp folder: it names SGLang's shared-memory segments, which the launcher removes."""
    instance = getattr(result, "instance_id", "")  # before 0.5.20 an ipc file's name does, and it lies there already
    if instance:
        (Path(tempfile.gettempdir()) / instance).touch()


def note_segments() -> None:
    """Leave the names of this process's semaphores (tqdm makes one) and message queues (of tensor parallel ranks) in the temp folder, for
    the launcher.

    SGLang ends its tree by SIGKILL, Python's resource tracker with it, so nobody else would unlink them.
    """
    # sglang distributed/device_communicators/shm_broadcast.py
    for queue in Path("/dev/shm").glob(f"sgl_shm_mq_{os.getpid()}_*"):
        (Path(tempfile.gettempdir()) / queue.name).touch()
    # glibc makes a semaphore under another name and links it: the map shows that name, deleted; the inode is the same.
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/sem." in line)
    inodes = {int(fields[4]) for fields in maps}
    for semaphore in Path("/dev/shm").glob("sem.mp-*"):
        with contextlib.suppress(FileNotFoundError):
            if semaphore.stat().st_ino in inodes:
                (Path(tempfile.gettempdir()) / semaphore.name).touch()


# ---------------------------------------------------------------- registration
# target -> (hook, kind, parameters that the target must have)
HOOKS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (around_load_model, "AROUND", ("self",)),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": (around_forward, "AROUND", ("self", "forward_batch")),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (after_init_new, "AFTER", ("batch", "model_runner")),
    "sglang.srt.managers.scheduler.Scheduler.abort_request": (before_abort, "BEFORE", ("self", "recv_req")),
    "sglang.srt.server_args.PortArgs.init_new": (after_port_args, "AFTER", ("server_args",)),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request": (replies.before_tokenize, "BEFORE", ("self", "obj")),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response": (
        replies.around_wait,
        "AROUND",
        ("self", "obj", "request"),
    ),
}


def check_target(target: str, wanted: tuple[str, ...]) -> str | None:
    """What is wrong with a hook target in this SGLang, or None."""
    try:
        importlib.import_module(
            target.rsplit(".", 2)[0]
        )  # resolve_name takes a module that fails to be imported for an attribute that is not there
        function = pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as e:
        return f"there is no {target} ({e})"
    have = inspect.signature(function).parameters
    missing = [p for p in wanted if p not in have]
    return f"{target} takes no {', '.join(missing)}: {list(have)}" if missing else None


def check_hooks_applied() -> None:
    """Raises EngineError unless SGLang really applied all hooks (it only logs when it could not)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(HOOKS) - HookRegistry._patched)
    if missing:
        raise EngineError(ErrorCode.ENGINE_START_FAILED, f"SGLang did not apply the hooks to {missing}")


def register() -> None:
    """Called by SGLang in each of its processes. Without our launcher's settings it does nothing."""
    if not os.environ.get("STATETAP_ENGINE_TAP"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrong = [w for target, (_, _, wanted) in HOOKS.items() if (w := check_target(target, wanted))]
    if wrong:
        import sglang

        raise fail(
            EngineError(ErrorCode.ENGINE_START_FAILED, f"SGLang {sglang.__version__} does not fit the capture plugin: {'; '.join(wrong)}")
        )
    for target, (hook, kind, _) in HOOKS.items():
        HookRegistry.register(target, hook, HookType[kind])
    if current().cpu:
        from .cpu.backends import register_backends

        register_backends()
