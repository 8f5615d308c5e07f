"""List the fields of an engine's configuration, as its sources have them, without importing them.

    python -m tools.engine_fields SITE_PACKAGES

SITE_PACKAGES has vLLM or SGLang, installed or unpacked. `simulator/launch/fields.csv` says of each
field what Headway makes of it; `tests/launch/test_fields.py` compares the two.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VLLM_CLASSES = {
    "config/scheduler.py": ["SchedulerConfig"],
    "config/cache.py": ["CacheConfig"],
    "config/parallel.py": ["ParallelConfig"],
    "config/speculative.py": ["SpeculativeConfig"],
    "config/lora.py": ["LoRAConfig"],
    "config/kv_transfer.py": ["KVTransferConfig"],
    "config/multimodal.py": ["MultiModalConfig"],
    "config/compilation.py": ["CompilationConfig"],
    "engine/arg_utils.py": ["EngineArgs", "AsyncEngineArgs"],
    "entrypoints/common/cli_args.py": ["BaseFrontendArgs", "FrontendArgs"],
    "entrypoints/openai/cli_args.py": ["BaseFrontendArgs", "FrontendArgs"],
}
"""Files of vLLM, and the classes in them whose fields are options or the engine's own books."""


class EngineField(NamedTuple):
    """A field: of which class, its annotation, its default and the options that set it."""

    owner: str
    name: str
    annotation: str
    default: str
    options: list[str]


def list_fields(site_packages: Path) -> Iterator[EngineField]:
    """Yield the fields of the engine in a folder; FileNotFoundError where there is none."""
    vllm, sglang = site_packages / "vllm", site_packages / "sglang/srt/arg_groups/fields"
    if (vllm / "engine").is_dir():
        parsed = ast.parse((vllm / "engine/arg_utils.py").read_text("utf-8"))
        named = dict(_options(parsed))
        for place, classes in VLLM_CLASSES.items():
            if (vllm / place).is_file():
                yield from _fields(vllm / place, classes, named)
    elif sglang.is_dir():
        for file in sorted(sglang.glob("*.py")):
            yield from _fields(file, None, {})
    else:
        raise FileNotFoundError(f"{site_packages}: neither vLLM nor SGLang is there")


def _options(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the field that an `add_argument` is for, and its options where it has short ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            names = [word for word in words if isinstance(word, str) and word.startswith("-")]
            if names:
                keys = [ast.unparse(k.value) for k in node.keywords if k.arg is None]
                field = keys[0].partition('["')[2] or keys[0].partition("['")[2] if keys else ""
                yield field[:-2] or names[0].lstrip("-").replace("-", "_"), names


def _fields(
    file: Path, classes: list[str] | None, named: dict[str, list[str]]
) -> Iterator[EngineField]:
    for node in ast.parse(file.read_text("utf-8")).body:
        if not isinstance(node, ast.ClassDef) or (classes and node.name not in classes):
            continue
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                name, kind = part.target.id, ast.unparse(part.annotation)
                constant = kind.startswith(("ClassVar", "InitVar")) or name.isupper()
                if constant or name == "_NS_PATH" or "Derived(" in kind:
                    continue
                default = ast.unparse(part.value) if part.value is not None else ""
                options = named.get(name, []) if classes else _aliases(part.annotation)
                yield EngineField(node.name, name, kind, default, options)


def _aliases(annotation: ast.expr) -> list[str]:
    """Return the other names that SGLang's `Arg` gives an option."""
    found: list[str] = []
    for node in ast.walk(annotation):
        if isinstance(node, ast.keyword) and node.arg in ("aliases", "cli_name"):
            words = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            found += [str(word.value) for word in words if isinstance(word, ast.Constant)]
    return [word for word in found if word.startswith("-")]


def main() -> None:
    """Print a line for each field."""
    for field in list_fields(Path(sys.argv[1])):
        print(*field[:2], " ".join(field.options), field.annotation[:60], field.default, sep="\t")


if __name__ == "__main__":
    main()
