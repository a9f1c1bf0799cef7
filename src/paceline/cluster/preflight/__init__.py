"""Finds what would end a run at its start, from its files alone: no weights are loaded and nothing is downloaded.

`paceline check` and `train` ask the same questions, so a run file that `check` calls valid does not fail for these
reasons later. A run file from elsewhere is safe to check: user code that it names is parsed and never imported.
"""

import importlib.util
import os
import shutil
from collections.abc import Collection

from paceline.cluster.preflight.environments import check_environment, hooks
from paceline.cluster.preflight.found import Preflight, PreflightError
from paceline.cluster.preflight.models import check_model, check_policy
from paceline.config import RunConfig
from paceline.config.apple import on_mlx, refused
from paceline.config.cluster import references, scored_here
from paceline.data.import_check import check_import
from paceline.monitor import exporter

__all__ = ["NEEDS_RAY", "Preflight", "PreflightError", "preflight", "refuse_unready"]

NEEDS_RAY = 'placement = "ray" needs Ray: pip install "paceline[ray]"'


def refuse_unready(config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise all problems at once; `given` names the environments that come as objects instead of from the run file."""
    if problems := preflight(config, given).problems:
        raise PreflightError(problems)


def preflight(config: RunConfig, given: Collection[str] = (), *, elsewhere: bool = False) -> Preflight:
    """Everything that can be found out before weights are loaded. `elsewhere`: the run is planned for another machine,
    so that what this one lacks is only noted."""
    found, machine = Preflight(), Preflight()
    _check_machine(config, machine)
    if elsewhere:
        found.notes += [f"on this machine: {problem}" for problem in machine.problems]
    else:
        found.add(machine.problems)
    check_policy(config, found)
    for name in scored_here(config):
        check_model(config.model.model_copy(update={"name": name}), found, mlx=False)
    for path in hooks(config.model_copy(update={"env": []})):
        found.attempt(lambda path=path: check_import(path))
    for env in config.env:
        check_environment(env, found, env.name in given)
    return found


def _check_machine(config: RunConfig, found: Preflight) -> None:
    """Packages, devices and keys that the run file asks for."""
    if on_mlx(config.backend):
        from paceline.cluster.mlx_kit import require_mlx

        found.add(refused(config))
        found.attempt(require_mlx)
    elif config.placement != "ray" and config.device == "cuda":
        from paceline.cluster.torch_kit import pick_device

        found.attempt(lambda: pick_device(config.device))
    if config.placement == "ray" and importlib.util.find_spec("ray") is None:
        found.add([NEEDS_RAY])
    for kind in config.record.exporters:
        found.attempt(lambda kind=kind: exporter(kind, config.record.project))
    launch = config.engine.launch
    if launch is not None and shutil.which(launch.python) is None:
        found.add([f"engine.launch.python: there is no interpreter `{launch.python}`: name the one that vLLM is in"])
    keys = [("engine.api_key_env", config.engine.api_key_env)]
    keys += [(f"{where}: teacher.api_key_env", ref.api_key_env) for where, _, ref in references(config)]
    for where, variable in keys:
        if variable is not None and not os.environ.get(variable):
            found.add([f"{where}: the environment variable {variable} is not set: put the key there"])
