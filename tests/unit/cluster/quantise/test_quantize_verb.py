"""`baton quantize` on the demo model, from the command line to its answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
from typer.testing import CliRunner

from cluster.cli.main import make_app
from cluster.cli.serve import DEMO
from demo.vocabulary import open_dialogue
from protos.errors import Misconfigured
from tests.numerics.paged import PagedRun
from workers.models.loader import load_model

ANSWER = "Test whether a path exists."


def run(*arguments: str) -> str:
    command = ("quantize", *arguments)
    return CliRunner().invoke(make_app(command), command, catch_exceptions=False, standalone_mode=False).output


def answer(folder: Path) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(open_dialogue("What does `os.path.exists` do?"), add_special_tokens=False).ids
    model, tokens, said = PagedRun(load_model(folder)), list(ids), list[int]()
    while len(said) < 6:
        logits = model.step([("answer", tokens, len(ids))])[0]
        tokens = [int(logits[-1].argmax())]
        said += tokens
    return str(tokenizer.decode(said))


@pytest.mark.parametrize(("method", "bits", "most"), [("rtn", 8, 0.01), ("rtn", 4, 0.04), ("gptq", 4, 0.04)])
def test_the_quantised_demo_model_answers_and_its_loss_is_told(
    method: str, bits: int, most: float, tmp_path: Path
) -> None:
    held_out = json.loads((Path(DEMO["model"]) / "held_out.json").read_text())
    (tmp_path / "some.json").write_text(json.dumps(held_out["source"][:3] + held_out["chat"][:6]))
    (tmp_path / "others.txt").write_text("\n\n".join(held_out["source"][3:13]))
    calibrated = [] if method == "rtn" else ["--calibrate", str(tmp_path / "others.txt")]
    told = run(
        DEMO["model"], str(tmp_path / "out"), "--method", method, "--bits", str(bits), *calibrated,
        "--evaluate", str(tmp_path / "some.json"),
    )  # fmt: skip
    assert re.search(r"about \d+:\d\d:\d\d", told), "the time that all layers take"
    match = re.search(r"per token: (\S+) before, (\S+) after \((\S+)%\)", told)
    assert match, told
    assert float(match[2]) < float(match[1]) * (1 + most)
    assert answer(tmp_path / "out").startswith(ANSWER[:20])


def test_mistakes_are_refused_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for flags, wanted in (
        (("--method", "gptq", "--calibrate", str(tmp_path / "empty.txt")), "give text of at least 512"),
        (("--evaluate", str(tmp_path / "empty.txt")), "give text of at least 2"),
        (("--bits", "5"), "give 4 or 8"),
        (("--group-size", "100"), "give 32, 64 or 128"),
        (("--method", "gptq"), "give --calibrate FILE"),
        (("--calibrate", str(tmp_path / "none.txt"), "--method", "awq"), "none.txt"),
    ):
        with pytest.raises(Misconfigured, match=wanted):
            run(DEMO["model"], str(tmp_path / "out"), *flags)
    assert not (tmp_path / "out").exists()
    (tmp_path / "wrong.json").write_text("[1, 2]")
    with pytest.raises(Misconfigured, match="a JSON list of texts"):
        run(DEMO["model"], str(tmp_path / "out"), "--evaluate", str(tmp_path / "wrong.json"))
