"""The configuration after a roll, and its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.revised import digest_of, next_revision, revised
from cluster.config.settings import make_config
from protos.errors import Misconfigured
from router.fleet_owner import Revision, SettingValue

CONFIG = make_config({"model": "m", "worker": {"prefill_chunk": 256}})
FIRST = Revision()


def changed(current: Revision = FIRST, model: str = "", files: str = "", **settings: SettingValue) -> Revision:
    paths = {name.replace("__", "."): value for name, value in settings.items()}
    return next_revision(CONFIG, current, model=model, settings=paths, fingerprint=files)


def test_settings_of_workers_change_and_add_up_over_rolls() -> None:
    change = changed(worker__prefill_chunk=512, lanes__stall_s=3)
    two = changed(change, model="/models/new", files="f", worker__max_num_seqs=9)
    config = revised(CONFIG, two)
    assert (config.worker.model, config.worker.revision) == ("/models/new", two.name)
    assert (config.worker.prefill_chunk, config.worker.lanes.stall_s, config.worker.max_num_seqs) == (512, 3.0, 9)
    assert len({FIRST.name, change.name, two.name}) == 3
    assert revised(CONFIG, FIRST) == CONFIG


def test_other_files_of_a_model_are_another_revision() -> None:
    assert changed(worker__prefill_chunk=256) == FIRST
    change = changed(model="/models/new", files="f")
    assert changed(change, model="/models/new", files="f") == change
    assert changed(change, model="/models/new", files="g").name not in ("", change.name)
    assert changed(model="models/new", files="f").model == str(Path("models/new").absolute())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("worker.dtpye", "float32", "there is no setting worker.dtpye: did you mean worker.dtype?"),
        ("pools.decode", 3, "pools.decode is no setting that a roll changes.*`baton scale`"),
        ("router.policy", "slo", "router.policy is no setting that a roll changes"),
        ("worker.device", "cpu", "worker.device is no setting that a roll changes"),
        ("worker.dtype", "float8", "dtype = 'float8'"),
        ("worker.prefill_chunk", "many", "worker.prefill_chunk = 'many': give a whole number"),
    ],
)
def test_fixed_settings_are_refused(path: str, value: SettingValue, message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        next_revision(CONFIG, FIRST, model="", settings={path: value}, fingerprint="")


def test_the_digest_covers_the_workers_settings() -> None:
    assert digest_of(CONFIG) == digest_of(make_config({"model": "m", "worker": {"prefill_chunk": 256}, "port": 9}))
    assert digest_of(CONFIG) != digest_of(make_config({"model": "m"}))
