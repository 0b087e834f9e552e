"""SkyRL's operators, run from the installed `skyrl` package (pip install --no-deps skyrl).

Only the files that hold the operators are imported: the package's own __init__ files ask for a whole training stack.
Collectives become no-ops, since a benchmark of one rank's shard measures none on either side.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import types
from types import ModuleType

import torch

_OPERATORS = "skyrl.backends.skyrl_train.distributed.megatron"
_UTILITIES = "skyrl.backends.skyrl_train.utils"


def _stub(name: str, path: pathlib.Path | None = None, **attributes: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = [] if path is None else [str(path)]
    vars(module).update(attributes)
    sys.modules[name] = module


def load() -> tuple[ModuleType, ModuleType, str]:
    """(model_utils, fused_linear_logprob_triton, version)."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("skyrl: expected the package to be installed: pip install --no-deps skyrl")
    root = pathlib.Path(spec.submodule_search_locations[0])
    for package in (_OPERATORS, _UTILITIES):
        parts = package.split(".")
        for depth in range(1, len(parts) + 1):
            _stub(".".join(parts[:depth]), root.joinpath(*parts[1:depth]))
    _stub("megatron")
    _stub("megatron.core")
    _stub("megatron.core.parallel_state", get_tensor_model_parallel_group=lambda: None)
    torch.distributed.all_reduce = lambda *args, **options: None
    operators = importlib.import_module(f"{_OPERATORS}.model_utils")
    triton = importlib.import_module(f"{_OPERATORS}.fused_linear_logprob_triton")
    return operators, triton, importlib.metadata.version("skyrl")
