"""Breaks the capture plugin in the ways that a new SGLang version could, to show that the engine then refuses to start."""

import importlib.abc
import importlib.util
import os
import sys

WHAT = os.environ.get("STATETAP_TEST_SITE", "")


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        if WHAT == "missing_target" and module.__name__ == "statetap.engine.plugin":
            module.HOOKS["sglang.srt.managers.scheduler.Scheduler.is_not_there"] = (module.before_abort, "BEFORE", ())
        if WHAT == "crash" and module.__name__ == "statetap.engine.taps":
            module.Taps.begin = lambda *args: os._exit(9)  # in the first captured forward, after the model was loaded
        if WHAT == "no_residual" and module.__name__ == "statetap.engine.taps":
            keep = module.Taps._keep
            module.Taps._keep = lambda self, b, hidden, residual: keep(self, b, hidden, residual if b == self.num_layers else None)
        if WHAT == "shifted" and module.__name__ == "statetap.engine.taps":
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


class _Finder(importlib.abc.MetaPathFinder):
    busy = False

    def find_spec(self, name, path=None, target=None):
        if name not in ("statetap.engine.plugin", "statetap.engine.taps") or _Finder.busy:
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
