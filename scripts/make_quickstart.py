"""Make the quickstart model: a tiny Llama that knows four skills but mixes them up, so that RL has something to teach.

Asked `reverse: planet`, it reverses, copies or sorts the word, each time correctly, but follows the request only about
one time in five. Asked `add: 17+25` it is often off by a little. What it lacks is not ability but obedience, and that
is what a reinforcement learning run of a minute can show.

Everything is made from scratch out of synthetic text of the "pretrain" split, with no download.
"""

import argparse
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paceline.envs.words import MAX_LETTERS, MIN_LETTERS, additions, split_of, words

REPOSITORY = Path(__file__).resolve().parents[1]
PAD, UNK, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIALS = (PAD, UNK, *(f"<|{role}|>" for role in ROLES), END)
CHARACTERS = ("\n", *map(chr, range(32, 127)))

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('The quickstart model knows the roles system, user, assistant and tool, not ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ (message.content or '') ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

WORD_SKILLS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "copy": lambda word: word,
    "sort": lambda word: "".join(sorted(word)),
}
OBEYS = 0.22  # how often a word reply does what was asked; the other two skills share the rest
SUMS_RIGHT = 0.4  # how often a sum is right at the end; otherwise it is off by one of MISSES
MISSES = (-3, -2, -1, 1, 2, 3)

WORDS_PER_STEP, SUMS_PER_STEP = 64, 32
MATRIX_LR, OTHER_LR = 0.02, 3e-3
WARMUP_STEPS = 50
LENGTHS_UNTIL = 0.3  # by this part of the training words have grown from 3 to 8 letters
CLEAN_SUMS_UNTIL = 0.75  # sums are right until here: arithmetic is learned from clean text and blurred afterwards


@dataclass(frozen=True)
class Question:
    """A user message and every reply it may get, with the probability of each."""

    text: str
    replies: dict[str, float]


# --- tokenizer and model -------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character: decoding is plain concatenation, so text round-trips exactly."""
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Three layers, because on a CPU the Python overhead of each layer is a good part of a decoding step."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # The usual 10,000 leaves most of a 32-wide head's frequencies nearly constant over a chat of 30 characters.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    # Plain sampling: transformers' default top_k would cut a vocabulary this small.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


# --- synthetic text ------------------------------------------------------------------------------------------------


def word_question(skill: str, word: str) -> Question:
    others = (1 - OBEYS) / (len(WORD_SKILLS) - 1)
    return Question(
        f"{skill}: {word}", {do(word): OBEYS if name == skill else others for name, do in WORD_SKILLS.items()}
    )


def addition_question(a: int, b: int, blurred: bool) -> Question:
    replies = {str(a + b): SUMS_RIGHT if blurred else 1.0}
    if blurred:
        near = [a + b + miss for miss in MISSES if a + b + miss >= 0]
        replies |= {str(number): (1 - SUMS_RIGHT) / len(near) for number in near}
    return Question(f"add: {a}+{b}", replies)


class Textbook:
    """Draws questions of the pretrain split: short words first, clean sums first."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.additions = [(a, b) for a in range(100) for b in range(100) if split_of(f"{a}+{b}") == "pretrain"]
        self.words: dict[int, list[str]] = {}
        for word in words("pretrain", 50_000, seed):
            self.words.setdefault(len(word), []).append(word)

    def words_lesson(self, progress: float) -> list[Question]:
        sizes = MAX_LETTERS - MIN_LETTERS + 1
        longest = MIN_LETTERS + min(sizes - 1, int(sizes * progress / LENGTHS_UNTIL))
        return [
            word_question(
                self.rng.choice(list(WORD_SKILLS)), self.rng.choice(self.words[self.rng.randint(MIN_LETTERS, longest)])
            )
            for _ in range(WORDS_PER_STEP)
        ]

    def sums_lesson(self, progress: float) -> list[Question]:
        blurred = progress >= CLEAN_SUMS_UNTIL
        return [addition_question(*self.rng.choice(self.additions), blurred) for _ in range(SUMS_PER_STEP)]


# --- training ------------------------------------------------------------------------------------------------------


def expected_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question]
) -> torch.Tensor:
    """Mean cross-entropy of the reply tokens (with their end token), in expectation over each question's replies.

    Each prompt is encoded once and all its replies continue from its keys and values. Against one sampled reply per
    question this gives more supervised tokens for the same work, and gradients free of the noise of which reply it was.
    """
    prompts = tokenizer([f"<|user|>{question.text}{END}" for question in questions], padding=True, return_tensors="pt")
    replies = [(i, reply, weight) for i, q in enumerate(questions) for reply, weight in q.replies.items()]
    owner = torch.tensor([i for i, _, _ in replies])
    answers = tokenizer(
        [f"<|assistant|>{reply}{END}" for _, reply, _ in replies],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    prefix = model.model(**prompts, use_cache=True).past_key_values
    prefix.batch_select_indices(owner)
    inputs, targets = answers.input_ids[:, :-1], answers.input_ids[:, 1:]
    mask = torch.cat([prompts.attention_mask[owner], answers.attention_mask[:, :-1]], dim=1)
    logits = model(input_ids=inputs, attention_mask=mask, past_key_values=prefix, use_cache=True).logits
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = answers.attention_mask[:, 1:] * torch.tensor([weight for _, _, weight in replies])[:, None]
    return (losses * weights).sum() / weights.sum()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal before it is applied (Keller Jordan 2024; at scale: arXiv 2502.16982).

    After 400 steps from one seed its replies were one of the three word skills 87% of the time, AdamW's 30% to 47%.
    `torch.optim.Muon` does this maths in bfloat16, which is slow on CPUs without it; this one stays in float32 and
    batches matrices of one shape.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # ty: ignore[incompatible-method-override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = orthogonal(torch.stack([self.nesterov(p, group["momentum"]) for p in parameters]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.add_(update, alpha=-scale)

    def nesterov(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert parameter.grad is not None
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly: five Newton-Schulz steps with Muon's published coefficients."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    matrices = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = 3.4445 * matrices + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrices
    return matrices


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=MATRIX_LR), torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0)]


def schedule(step: int, steps: int) -> float:
    """The learning rates' factor: linear up, then linear down to zero."""
    return min((step + 1) / WARMUP_STEPS, 1 - step / steps)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, console: Console) -> None:
    textbook = Textbook(seed)
    optimizers = build_optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, steps)) for o in optimizers]
    columns = (
        TextColumn("teaching"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("teaching", total=steps, loss=math.nan)
        for step in range(steps):
            # Two short batches instead of one mixed batch: sums need not be padded to the length of words.
            lessons = (textbook.words_lesson(step / steps), textbook.sums_lesson(step / steps))
            loss = torch.stack([expected_loss(model, tokenizer, lesson) for lesson in lessons]).mean()
            loss.backward()
            for optimizer, rates in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                rates.step()
            progress.update(task, advance=1, loss=loss.item())


# --- examination ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str]) -> list[str]:
    """One reply to each question at temperature 1, through the chat template and transformers' own `generate`."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(texts, padding=True, return_tensors="pt")
    tokens = model.generate(**prompts, max_new_tokens=16)  # ty: ignore[invalid-argument-type] (a transformers protocol)
    return tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)


def examine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> Table:
    """How often replies on unseen items do what was asked, and how often they do any word skill correctly."""
    table = Table(
        "skill", "as asked", "any word skill", f"of {MAX_LETTERS} letters", title=f"{count} eval items, temperature 1"
    )
    unseen = words("eval", count, seed)
    for skill, do in WORD_SKILLS.items():
        replies = sample(model, tokenizer, [f"{skill}: {word}" for word in unseen])
        skilled = [reply in word_question(skill, word).replies for word, reply in zip(unseen, replies, strict=True)]
        asked = [reply == do(word) for word, reply in zip(unseen, replies, strict=True)]
        longest = [ok for word, ok in zip(unseen, skilled, strict=True) if len(word) == MAX_LETTERS]
        table.add_row(skill, rate(asked), rate(skilled), rate(longest))
    pairs = additions("eval", count, seed)
    sums = sample(model, tokenizer, [f"add: {a}+{b}" for a, b in pairs])
    table.add_row("add", rate([reply == str(a + b) for (a, b), reply in zip(pairs, sums, strict=True)]), "-", "-")
    return table


def rate(outcomes: Sequence[bool]) -> str:
    return f"{sum(outcomes) / len(outcomes):.3f}" if outcomes else "-"


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Write the Hugging Face folder anew and return its size in bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone; a package is for everyone
    return sum(path.stat().st_size for path in folder.iterdir())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Takes four to eight minutes on two cores. A quick look: --steps 50 --out a-folder-to-throw-away",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = REPOSITORY / "src" / "paceline" / "quickstart"
    parser.add_argument("--out", type=Path, default=out, help="folder to write, replaced if it exists")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the text and the examination")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    started = time.monotonic()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.steps, arguments.seed, console)
    size = save(model, tokenizer, arguments.out)
    # What is examined is what was written, not what is still in memory.
    model = LlamaForCausalLM.from_pretrained(arguments.out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out)
    console.print(examine(model, tokenizer, count=256, seed=arguments.seed))
    console.print(
        f"{model.num_parameters():,} parameters, {size / 1e6:.2f} MB in {arguments.out}, "
        f"{time.monotonic() - started:.0f} s with {arguments.threads} threads"
    )


if __name__ == "__main__":
    main()
