"""The chat templates of a model by name, as transformers finds them."""

from __future__ import annotations

from typing import Any

from protos.errors import BadCheckpoint
from protos.model_files.files_seam import ModelFiles
from protos.model_files.folder import TEMPLATES
from protos.model_files.plain_files import read_text

DEFAULT, TOOL_USE = "default", "tool_use"


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Reads chat_template.jinja and additional_chat_templates/NAME.jinja, in the folder or next to a GGUF file. Without
    chat_template.jinja, also tokenizer_config.json or, for a model that reads images, chat_template.json.

    Raises BadCheckpoint.
    """
    folder = files.path if files.path.is_dir() else files.path.parent
    beside = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    beside[DEFAULT] = folder / "chat_template.jinja"
    texts = {name: text for name, path in beside.items() if (text := read_text(path)) is not None}
    if DEFAULT in texts:
        return texts
    for name in ("tokenizer_config.json", "chat_template.json"):
        if listed := (files.json(name) or {}).get("chat_template"):
            return _named(listed, files.where(name)) | texts
    return texts


def _named(listed: Any, where: str) -> dict[str, str]:
    try:
        named = {DEFAULT: listed} if isinstance(listed, str) else {entry["name"]: entry["template"] for entry in listed}
    except (KeyError, TypeError):
        named = {"": None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise BadCheckpoint(f"{where}: chat_template must be a string, or a list of objects with 'name' and 'template'")
    return named
