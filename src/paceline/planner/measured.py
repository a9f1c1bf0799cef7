"""Shares of a device's data-sheet speed that real runs reach, fitted to measurements; each says which."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Shares of what the device could do, and the fixed costs that no data sheet has."""

    bandwidth: float
    """Share of the memory's bandwidth."""
    flops: float
    """Share of the flops, in decoding and prompts."""
    launch: float
    """Seconds a decode step spends on each layer, however few requests it has."""
    logits: float
    """Bytes moved per entry of the vocabulary to sample one token."""
    request: float
    """Seconds of the host per token sampled."""
    rollout: float
    """Seconds of the host per rollout: admitting, rendering, scoring."""
    train_flops: float
    """Share of the flops, in training."""
    train_bytes: float
    """Bytes moved in training per token, layer and unit of the hidden size: norms, activations, residuals."""
    handover: float
    """Seconds of a publish beyond moving the bytes: fingerprint, canary, swap."""
    eager_decode: float
    """Times `launch` where the engine is not compiled."""
    eager_train: float
    """Times `train_bytes` where the trainer is not compiled."""
    source: str


GPU = Reach(
    bandwidth=0.66,
    flops=0.60,
    launch=48.5e-6,
    logits=16.0,
    request=0.0,
    rollout=0.0,
    train_flops=0.80,
    train_bytes=580.0,
    handover=0.07,
    eager_decode=2.0,
    eager_train=1.5,
    source="engine-h200.json (0.5B and 1.5B; 1, 64 and 256 requests) and trainer-h200.json (packed steps)",
)
"""Two models at three sizes give bandwidth, flops and launches of decoding; two packed steps those of training."""

CPU = Reach(
    bandwidth=0.66,
    flops=0.90,
    launch=1.07e-3,
    logits=16.0,
    request=70e-6,
    rollout=0.8e-3,
    train_flops=0.40,
    train_bytes=0.0,
    handover=0.025,
    eager_decode=1.0,
    eager_train=1.0,
    source="spine-cpu.json (trainer), decode steps of 1 to 128 requests and one quickstart run on two Neoverse N1",
)
"""The quickstart's model alone. `launch`, `request` and `rollout` have no file in `benchmarks/results` behind them."""

ADAPTED = 0.63
"""Speed of decoding through adapters: 65.5k of 107.7k tokens/s at 0.5B, 41.0k of 62.2k at 1.5B (engine-h200.json)."""
DETERMINISTIC = 0.44
"""Speed of decoding with `deterministic = true` on a GPU (engine-h200.json)."""
OVER_HTTP = 0.93
"""Speed of an engine behind HTTP (engine-http-h200.json)."""
RANKS = 0.9
"""Speed of each of several ranks, relative to one alone. Assumed, not measured."""
CONDUCTED = 5170.0
"""Rollouts a second that one core can conduct (orchestrator-cpu.json)."""


def reach(kind: str) -> Reach:
    return GPU if kind == "cuda" else CPU
