"""The key that was probably meant."""

from difflib import get_close_matches

from paceline.config.fields import ROOT, KeyPath, Spot, places

SIBLING_LIKENESS = 0.7
DISTANT_LIKENESS = 0.8
"""A key far from where it was written has to look more alike before it is worth naming."""

CLIPS = ("loss.clip_low", "loss.clip_high")

ALIASES: dict[str, tuple[str, ...]] = {
    # What users of TRL, verl, OpenRLHF and prime-rl would type.
    "learning_rate": ("lr",),
    "adam_epsilon": ("eps",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "num_warmup_steps": ("warmup_steps",),
    "lr_warmup_steps": ("warmup_steps",),
    "clip_grad": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "max_norm": ("max_grad_norm",),
    "clip_range": CLIPS,
    "cliprange": CLIPS,
    "clip_ratio": CLIPS,
    "clip_eps": CLIPS,
    "epsilon": ("eps", *CLIPS),
    "epsilon_low": ("loss.clip_low",),
    "clip_ratio_low": ("loss.clip_low",),
    "epsilon_high": ("loss.clip_high",),
    "clip_ratio_high": ("loss.clip_high",),
    "loss_agg_mode": ("normalise",),
    "max_new_tokens": ("sampling.max_tokens",),
    "max_completion_length": ("sampling.max_tokens",),
    "max_response_length": ("sampling.max_tokens",),
    "max_model_len": ("engine.max_context",),
    "max_num_seqs": ("engine.max_running",),
    "num_generations": ("group_size",),
    "rollouts_per_example": ("group_size",),
    "n_samples_per_prompt": ("group_size",),
    "per_device_train_batch_size": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "rollout_batch_size": ("batch_size",),
    "max_steps": ("steps",),
    "total_training_steps": ("steps",),
    "num_train_epochs": ("epochs",),
    "total_epochs": ("epochs",),
    "max_off_policy_steps": ("staleness",),
    "max_staleness": ("staleness",),
    "max_async_level": ("staleness",),
    "async_level": ("staleness",),
    "model_name": ("model.name",),
    "model_name_or_path": ("model.name",),
    "model_path": ("model.name",),
    "tokenizer_name": ("model.tokenizer",),
    "torch_dtype": ("model.dtype",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_dropout": ("lora.dropout",),
    "target_modules": ("lora.targets",),
    "run_name": ("name",),
    "output_dir": ("runs",),
    "resume_from_checkpoint": ("resume",),
    "eval_steps": ("eval.every",),
    "eval_interval": ("eval.every",),
    "test_freq": ("eval.every",),
    "save_steps": ("checkpoint.every",),
    "save_freq": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep",),
    "report_to": ("record.exporters",),
    "algorithm": ("algo",),
    "adv_estimator": ("algo.type",),
    "environment": ("env",),
}


def nearest_keys(unknown: KeyPath, siblings: list[str], root: Spot = ROOT) -> list[KeyPath]:
    """The keys `unknown` may have meant, all equally likely; none when nothing comes close.

    A known alias first, then a sibling of similar spelling, then the same key elsewhere in the file, then a
    similar one elsewhere: `trainer.lr` gives `trainer.optimizer.lr`.
    """
    *at, key = unknown
    key = str(key).replace("-", "_")
    everywhere = [_beside(unknown, path) for path, _ in places(root)]
    if key in ALIASES:
        return _closest(unknown, [path for alias in ALIASES[key] for path in _ending(everywhere, alias)])
    if near := get_close_matches(key, siblings, n=1, cutoff=SIBLING_LIKENESS):
        return [(*at, near[0])]
    if same := _closest(unknown, _ending(everywhere, key)):
        return same
    keys = {str(path[-1]) for path in everywhere}
    near = get_close_matches(key, keys, n=1, cutoff=DISTANT_LIKENESS)
    return _closest(unknown, _ending(everywhere, near[0])) if near else []


def _beside(unknown: KeyPath, path: KeyPath) -> KeyPath:
    """The same key of the list element the unknown key stands in: `env.2`, where `places` says `env.0`."""
    inside = len(unknown) > 2 and isinstance(unknown[1], int) and path[:2] == (unknown[0], 0)
    return unknown[:2] + path[2:] if inside else path


def _ending(paths: list[KeyPath], end: str) -> list[KeyPath]:
    keys = tuple(end.split("."))
    return [path for path in paths if path[-len(keys) :] == keys]


def _closest(unknown: KeyPath, candidates: list[KeyPath]) -> list[KeyPath]:
    """Those that share most of the way with where the key was written; among them the shortest."""

    def distance(path: KeyPath) -> tuple[int, int]:
        pairs = list(zip(path, unknown[:-1], strict=False))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return -shared, len(path)

    best = min(map(distance, candidates), default=None)
    return list(dict.fromkeys(path for path in candidates if distance(path) == best))
