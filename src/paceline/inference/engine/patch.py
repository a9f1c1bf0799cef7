"""Changing a few elements of the weights an engine holds, if they are the ones the change builds on."""

from collections.abc import Mapping

from torch import Tensor

from paceline.inference.base import EngineError, Mismatch, OtherBase
from paceline.inference.engine.catalog import BASE, Catalog
from paceline.model import WeightUpdate, fingerprint
from paceline.model.delta import Delta, DeltaError


def proved(parameters: Mapping[str, Tensor], update: WeightUpdate, catalog: Catalog) -> str:
    """The fingerprint the weights will have once the update's delta is written to them. Nothing is changed yet.

    The base is proved before: by the mark it was proved with when it came, or else by looking at all of it. What the
    changed elements make of that mark is the new one, and must be the sender's.
    """
    delta = update.delta
    assert delta is not None
    try:
        _check_base(parameters, delta, catalog)
        sent = delta.moved(parameters)
        if {sent} != {sent, update.expected or sent, delta.result.fingerprint}:
            raise Mismatch(
                f"the delta to version {update.version} is damaged: it leads to weights {sent}, not to "
                f"{update.expected or delta.result.fingerprint}"
            )
    except DeltaError as error:
        raise EngineError(str(error)) from error
    return sent


def _check_base(parameters: Mapping[str, Tensor], delta: Delta, catalog: Catalog) -> None:
    version, base = catalog.versions[BASE], delta.base
    held = None
    if version == base.version:
        whole = delta.entries.keys() == parameters.keys()
        held = catalog.weights[BASE].get(version) if whole else None
        held = held or fingerprint((name, parameters[name]) for name in delta.entries)
    if held != base.fingerprint:
        raise OtherBase(
            f"the delta builds on version {base.version} ({base.fingerprint}), and this engine holds version {version}"
            f"{f' ({held})' if held else ''}: send all weights"
        )
