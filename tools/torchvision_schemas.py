"""Make torchvision from the public index importable beside a CPU build of torch.

That torchvision is a CUDA build: beside a CPU torch its compiled operators do not load, and its
Python part then describes operators that nobody has defined. Their schemas are all that an
import needs; no engine here calls them. ``environment.py`` copies this file into the environment
of the CPU engines alone, where every start of Python imports it. Until something imports
torchvision it costs one entry in ``sys.meta_path``.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# A library takes its declarations with it when it is collected.
_kept: list[object] = []


def _declare() -> None:
    import torch

    library = torch.library.Library('torchvision', 'FRAGMENT')
    library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    library.define('qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    _kept.append(library)


class TorchvisionFinder:
    """Finds torchvision as usual, and declares the schemas just before it runs."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        if name != 'torchvision':
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_with_schemas(module: ModuleType) -> None:
            if not _kept:
                _declare()
            run(module)

        spec.loader.exec_module = run_with_schemas  # type: ignore[method-assign]  # this one only
        return spec


sys.meta_path.insert(0, TorchvisionFinder)
