"""Finds the key that a wrong one stands for: another trainer's name for it, or one of similar spelling."""

from collections.abc import Sequence
from difflib import get_close_matches

from paceline.config.fields import ROOT, KeyPath, SchemaNode, key_paths

FOREIGN_NAMES = {
    # TRL, verl, OpenRLHF, prime-rl and other loops. A dotted name counts below that table only.
    "lr": "learning_rate optim.lr",
    "eps": "adam_epsilon epsilon",
    "betas": "adam_beta1 adam_beta2",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "warmup_steps": "num_warmup_steps lr_warmup_steps",
    "max_grad_norm": "clip_grad grad_clip max_norm",
    "optimizer.offload": "offload_optimizer",
    "parallel.cpu_offload": "offload_model param_offload",
    "parallel.shard": "fsdp fsdp_size",
    "parallel.replicas": "ddp ddp_size",
    "parallel.tensor": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
    "parallel.context": "sp sp_size cp context_parallel_size ulysses_sequence_parallel_size",
    "loss.clip_low": "actor.clip "
    "clip_range cliprange clip_ratio clip_eps epsilon epsilon_low clip_ratio_low ppo_clip_min",
    "loss.clip_high": "actor.clip "
    "clip_range cliprange clip_ratio clip_eps epsilon epsilon_high clip_ratio_high ppo_clip_max",
    "loss.low": "dppo_mask_low token_mask_low",
    "loss.high": "dppo_mask_high token_mask_high",
    "loss.type": "policy_loss loss_type",
    "normalise": "loss_agg_mode agg_mode",
    "minibatches": "update_per_rollout ppo_n_minibatches",
    "trainer.kl.coef": "actor.kl.coef kl_coef kl_beta kl_loss_coef beta use_kl_penalty",
    "trainer.kl.reference": "ref_actor.model_name ref_model",
    "trainer.kl.kind": "kl.reward_estimator kl.loss_estimator kl_loss_type",
    "trainer.kl.how": "kl.type",
    "trainer.entropy_coef": "entropy.coef entropy_coeff",
    "trainer.critic.freeze_steps": "critic_warmup actor.freeze_steps",
    "trainer.critic.value_clip": "critic.clip cliprange_value",
    "trainer.critic.gamma": "adv.gamma",
    "trainer.critic.lam": "adv.lamda adv.lam",
    "trainer.micro_batch_tokens": "max_length_per_device micro_batch_token_budget max_tokens_per_gpu seq_len",
    "batch_size": "per_device_train_batch_size train_batch_size rollout_batch_size prompts_per_rollout",
    "sampling.max_tokens": "max_new_tokens max_completion_length max_response_length sampling.max_length",
    "engine.max_context": "max_model_len max_prompt_length",
    "engine.max_running": "max_num_seqs",
    "engine.cache_gib": "gpu_memory_utilization",
    "group_size": "num_generations rollouts_per_example n_samples_per_prompt num_samples_per_prompt "
    "responses_per_prompt completions_per_prompt sampling.n",
    "max_inflight": "max_concurrent max_inflight_rollouts",
    "model.concurrency": "max_concurrent",
    "model.requests_per_minute": "rate_limit rpm max_requests_per_minute",
    "oversample": "oversampling_factor",
    "steps": "max_steps total_training_steps",
    "epochs": "num_train_epochs total_epochs n_epochs",
    "staleness": "max_off_policy_steps max_staleness max_async_level async_level max_head_offpolicy_versions "
    "staleness_limit",
    "model.name": "model_name model_name_or_path model_path inference.model",
    "model.tokenizer": "tokenizer_name",
    "model.dtype": "torch_dtype",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules",
    "name": "run_name experiment_name wandb_run_name",
    "runs": "output_dir save_dir",
    "resume": "resume_from_checkpoint load_ckpt_from",
    "eval.every": "eval_steps eval_interval eval_every eval.interval test_freq",
    "eval.sampling": "test_sampling_params",
    "checkpoint.every": "save_steps save_freq checkpoint_every ckpt.interval",
    "checkpoint.keep": "save_total_limit ckpt.keep_last",
    "record.exporters": "report_to use_wandb",
    "record.project": "wandb_project wandb.project trainer.project",
    "engine.base_url": "inference_url",
    "filters.zero_advantage": "dynamic_filtering",
    "algo": "algorithm",
    "algo.type": "adv_estimator adv.estimator",
    "algo.tools": "tool_names",
    "algo.std": "norm_var scale_rewards",
    "algo.baseline": "global_norm",
    "env": "environment",
    "env.module": "env_path env.path",
    "env.dataset": "train_data_path data_path env.path",
    "env.eval_dataset": "test_data_path eval_data_path eval_path",
    "env.max_turns": "rollout.max_turns",
    "env.import_path": "reward_fn reward_funcs env.path",
    "env.judges": "env.judge",
    "env.weight": "env.ratio",
    "env.id": "env_id",
    "env.args": "env_args",
    "env.corpus": "corpus_path",
}


def _aliases() -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for key, names in FOREIGN_NAMES.items():
        for name in names.split():
            aliases.setdefault(name, []).append(key)
    return aliases


ALIASES = _aliases()


def foreign_keys(path: Sequence[str | int]) -> list[str]:
    """The ends of the keys that another trainer's key stands for; the longest name of it that is known decides."""
    words = [str(part).replace("-", "_") for part in path if not isinstance(part, int)]
    names = (".".join(words[start:]) for start in range(len(words)))
    return next((ALIASES[name] for name in names if name in ALIASES), [])


SIBLING_LIKENESS = 0.7
DISTANT_LIKENESS = 0.8
"""A key far from where it was written has to look more alike before it is worth naming."""


def nearest_keys(unknown: KeyPath, siblings: list[str], root: SchemaNode = ROOT) -> list[KeyPath]:
    """The keys `unknown` may have meant, all equally likely; none when nothing comes close.

    Another trainer's name for it first, then a sibling of similar spelling, then the same key elsewhere in the file,
    then a similar one elsewhere: `trainer.lr` gives `trainer.optimizer.lr`.
    """
    *at, key = unknown
    key = str(key).replace("-", "_")
    everywhere = [_in_same_element(unknown, path) for path, _ in key_paths(root)]
    if meant := foreign_keys(unknown):
        found = [path for alias in meant for path in _ending_with(everywhere, alias)]
        beside = [path for path in found if path[:-1] == tuple(at) and path[-1] in siblings]
        of_the_run = [path for path in found if len(path) == 1]
        return list(dict.fromkeys(beside or of_the_run)) or _closest(unknown, found)
    if near := get_close_matches(key, siblings, n=1, cutoff=SIBLING_LIKENESS):
        return [(*at, near[0])]
    if same := _closest(unknown, _ending_with(everywhere, key)):
        return same
    keys = {str(path[-1]) for path in everywhere}
    near = get_close_matches(key, keys, n=1, cutoff=DISTANT_LIKENESS)
    return _closest(unknown, _ending_with(everywhere, near[0])) if near else []


def foreign_places(path: KeyPath, root: SchemaNode) -> list[KeyPath]:
    """Where a key of another trainer's stands: by its foreign name, or by the same name, as much of it as is known."""
    if foreign_keys(path):
        return nearest_keys(path, [], root)
    everywhere = [known for known, _ in key_paths(root)]
    ends = (_ending_with(everywhere, ".".join(map(str, path[start:]))) for start in range(len(path)))
    return _closest(path, next(filter(None, ends), []))


def _in_same_element(unknown: KeyPath, path: KeyPath) -> KeyPath:
    """The same key of the list element the unknown key stands in: `env.2`, where `key_paths` says `env.0`."""
    inside = len(unknown) > 2 and isinstance(unknown[1], int) and path[:2] == (unknown[0], 0)
    return unknown[:2] + path[2:] if inside else path


def _ending_with(paths: list[KeyPath], end: str) -> list[KeyPath]:
    """Those that end so, the places of list elements aside."""
    keys = end.split(".")
    return [path for path in paths if [key for key in path if isinstance(key, str)][-len(keys) :] == keys]


def _closest(unknown: KeyPath, candidates: list[KeyPath]) -> list[KeyPath]:
    """Those that share most of the way with where the key was written; among them the shortest."""

    def distance(path: KeyPath) -> tuple[int, int]:
        pairs = list(zip(path, unknown[:-1], strict=False))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return -shared, sum(isinstance(key, str) for key in path)

    best = min(map(distance, candidates), default=None)
    return list(dict.fromkeys(path for path in candidates if distance(path) == best))
