"""Breaks the capture plugin in the ways that a new SGLang version could, to show that the engine then refuses to start; and slows it,
or lets a prefix cache in, to show what becomes of requests then. STATETAP_TEST_SITE: what to do, by commas.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

WHAT = os.environ.get("STATETAP_TEST_SITE", "").split(",")
PATCHED = {"statetap.engine." + name for name in ("plugin", "taps", "writer", "flags", "modes")}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        if "missing_target" in WHAT and module.__name__ == "statetap.engine.plugin":
            module.HOOKS["sglang.srt.managers.scheduler.Scheduler.is_not_there"] = (module.before_abort, "BEFORE", ())
        if "crash" in WHAT and module.__name__ == "statetap.engine.taps":
            module.Taps.begin = lambda *args: os._exit(9)  # in the first captured forward, after the model was loaded
        if "no_residual" in WHAT and module.__name__ == "statetap.engine.taps":
            keep = module.Taps._keep
            module.Taps._keep = lambda self, b, hidden, residual: keep(self, b, hidden, residual if b == self.num_layers else None)
        if "shifted" in WHAT and module.__name__ == "statetap.engine.taps":
            real = module.Taps._layer_hook

            init = module.Taps.__init__

            def shifted(self, stack, profile, *args):
                layers = stack.layers
                init(self, stack, profile, *args)
                for layer in layers:  # every tap sits one layer too late
                    layer._forward_pre_hooks.clear()
                for b in profile.boundaries:
                    layer = layers[min(b + 1, len(layers) - 1)]
                    layer.register_forward_pre_hook(real(self, b, layer), with_kwargs=True)

            module.Taps.__init__ = shifted

        if "slow_writer" in WHAT and module.__name__ == "statetap.engine.writer":
            write, told = (
                module._pwrite_all,
                os.environ["STATETAP_TEST_SLOW"],
            )  # a file: seconds a write while it is there; "stall": that long

            def slow(*args):
                while os.path.exists(told):
                    with open(told) as f:
                        how = f.read()
                    time.sleep(0.01 if how == "stall" else float(how or 0))
                    if how != "stall":
                        break
                return write(*args)

            module._pwrite_all = slow
        if "prefix_cache" in WHAT and module.__name__ == "statetap.engine.flags":
            argv = module.server_argv
            module.server_argv = lambda **given: [a for a in argv(**given) if a != "--disable-radix-cache"]
        if "prefix_cache" in WHAT and module.__name__ == "statetap.engine.modes":
            module.check_modes = lambda server_args: None


class _Finder(importlib.abc.MetaPathFinder):
    busy = False

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHED or _Finder.busy:
            return None
        _Finder.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _Finder.busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
