"""The trainers' own packages, as oracles. Imported on a CPU without their heavy dependencies.

Each wheel is installed without dependencies into a folder of its own and reached through modules with a `__path__`, so
that nothing else of it (verl ships a top-level package `tests`) gets into the way.
"""

import contextlib
import importlib
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch.distributed as dist

VERSIONS = {"skyrl": "0.4.0", "verl": "0.9.1", "trl": "1.16.0"}
FOLDER = pathlib.Path(os.environ.get("LMHEAD_HOSTS_DIR") or pathlib.Path(__file__).parents[2] / "build" / "hosts")


@contextlib.contextmanager
def one_rank_group(folder, backend):
    """A tensor-parallel group of one rank, which a host needs; the group that is there already, else one for now."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group(backend, store=dist.FileStore(str(folder / "file"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    if ours:
        dist.destroy_process_group()


def _installed(name):
    """The folder with the host's wheel; skips the test only when the package registry cannot be reached."""
    folder = FOLDER / f"{name}-{VERSIONS[name]}"
    if not (folder / name).is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--ignore-requires-python", "--no-compile", "--target", str(folder), f"{name}=={VERSIONS[name]}"]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            unreachable = any("connection" in line.lower() or "resolve" in line.lower() for line in lines)
            if not unreachable:
                pytest.fail(f"pip install {name}: {lines[-1]}")
            pytest.skip(f"package registry not reachable for {name}=={VERSIONS[name]}")
    return folder


def _module(name, path=None, **attributes):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _packages(root, *names):
    for name in names:
        if name not in sys.modules:
            _module(name, root / name.replace(".", "/"))


class _Absent(types.ModuleType):
    """A dependency that the host imports and that no test uses."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _absent(name):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = _Absent(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)


def skyrl():
    """skyrl's model_utils."""
    name = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    if name not in sys.modules:
        root = _installed("skyrl")
        _packages(root, "skyrl", "skyrl.backends", "megatron", "megatron.core")
        import torch.distributed as dist

        _module("megatron.core.parallel_state", get_tensor_model_parallel_group=lambda: dist.group.WORLD)
    return importlib.import_module(name)


def skyrl_fused_lm_head():
    """skyrl's fused_lm_head, with the parts of megatron-core that it asks."""
    skyrl()
    _packages(pathlib.Path(), "megatron.core.models", "megatron.core.models.hybrid", "megatron.core.pipeline_parallel")
    hybrid = "megatron.core.models.hybrid.hybrid_model"
    if hybrid not in sys.modules:
        _module("megatron.core.fp8_utils", is_mxfp8_output_proj_active=lambda config: config.mxfp8)
        _module(hybrid, HybridModel=type("HybridModel", (), {}))
        _module(
            "megatron.core.pipeline_parallel.fine_grained_activation_offload",
            FineGrainedActivationOffloadingInterface=object,
        )
        _module("megatron.core.utils", unwrap_model=lambda model: model)
    return importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.fused_lm_head")


def _verl_packages():
    root = _installed("verl")
    _packages(root, "verl", "verl.utils", "verl.plugin", "verl.utils.kernel", "verl.utils.experimental")


def verl():
    """verl's torch_functional, its reference on a CPU."""
    _verl_packages()
    return importlib.import_module("verl.utils.experimental.torch_functional")


def verl_kernel():
    """verl's linear_cross_entropy, which runs on CUDA devices only."""
    _verl_packages()
    return importlib.import_module("verl.utils.kernel.linear_cross_entropy")


def trl():
    """trl.kernels and trl.trainer.utils."""
    root = _installed("trl")
    _packages(root, "trl", "trl.trainer")
    for name in ("pandas", "datasets"):
        _absent(name)
    if str(root) not in sys.path:
        sys.path.append(str(root))  # importlib.metadata looks the version up
    return importlib.import_module("trl.kernels"), importlib.import_module("trl.trainer.utils")
