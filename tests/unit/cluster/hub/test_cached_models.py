"""`baton models` shows the cache, and removes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.hub.cached_models import PUBLISHED, cached_models, fitting_models
from cluster.hub.download import cache_folder, local_model
from cluster.hub.models_verb import ModelsVerb, models
from protos.errors import Misconfigured, Unavailable
from protos.model_files.hub_name import HubName
from tests.unit.cluster.hub.fake_hub import FakeHub

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"


def test_cached_models_are_listed_and_removed(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    files = {file.name: file.read_bytes() for file in DEMO.iterdir()}
    first = hub.add("acme/tiny", files)
    hub.add("acme/other", {"config.json": b'{"model_type": "none"}', "model.safetensors": b"?"})
    local_model("acme/tiny")
    hub.add("acme/tiny", {**files, "generation_config.json": b"{}"})
    for name in ("acme/tiny@main", "acme/other"):
        local_model(name)
    models()
    shown = capsys.readouterr().out
    assert "acme/tiny" in shown
    other, *tinies = cached_models()
    assert other.problem
    for tiny in tinies:
        assert (tiny.name.repository, tiny.family, tiny.encoding) == ("acme/tiny", "llama", "bfloat16")
        assert tiny.num_bytes == len(files["model.safetensors"]) < tiny.needed_bytes
    models(ModelsVerb.RM, [f"acme/tiny@{first}", "acme/other"])
    assert [one.name.revision for one in cached_models()] == [hub.commit("acme/tiny", "main")]
    with pytest.raises(Misconfigured):
        models(ModelsVerb.RM, ["acme/tini"])
    with pytest.raises(Misconfigured):
        models(ModelsVerb.RM)


def test_partial_downloads_are_removed_too(hub: FakeHub) -> None:
    hub.add("acme/tiny", {"config.json": b"{}", "model.safetensors": bytes(10_000)})
    hub.cuts = [5_000, *[0] * 20]
    with pytest.raises(Unavailable):
        local_model("acme/tiny")
    models(ModelsVerb.RM, ["acme/tiny"])
    assert not cache_folder(HubName(repository="acme/tiny")).exists()


@pytest.mark.parametrize("free_gb", [0, 1, 8, 16, 100])
def test_named_models_fit_twice_with_room_for_kv(free_gb: int) -> None:
    names = fitting_models(int(free_gb * 1e9))
    assert all(4 * PUBLISHED[name] < free_gb * 1e9 for name in names)
    assert len(names) == {0: 0, 1: 0, 8: 2, 16: 2, 100: 2}[free_gb]
