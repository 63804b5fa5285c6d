"""All formats by name. Importing it imports torch."""

from __future__ import annotations

from .angelslim import AngelSlim
from .base import Format, FormatName
from .eagle1 import Eagle1
from .modelopt import ModelOpt
from .specforge import SpecForge
from .speculators import Speculators
from .vllm import Vllm

FORMATS: dict[FormatName, Format] = {f.name: f for f in (SpecForge(), Speculators(), Vllm(), ModelOpt(), AngelSlim(), Eagle1())}
