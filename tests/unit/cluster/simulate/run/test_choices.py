"""The clusters that a scenario compares."""

from __future__ import annotations

from cluster.config.scenario import ClusterTable
from cluster.simulate.run.choices import choices
from cluster.simulate.run.simulation_config import read_settings


def names(**keys: object) -> list[str]:
    made = choices(ClusterTable(**keys), read_settings())  # type: ignore[arg-type]
    return [str(choice).rpartition(" ")[0] for choice in made]


def test_max_gpus_tries_every_split() -> None:
    every = names(max_gpus=4, tp=[1, 2])
    assert {"4 colocated tp1", "2 colocated tp2", "1P+3D tp1", "3P+1D tp1", "1P+1D tp2"} <= set(every)
    assert len(set(every)) == len(every) == 4 + 6 + 2 + 1


def test_lists_and_ranges_are_combined_smallest_first() -> None:
    assert names(prefill="0:1", decode=[2, 1]) == ["1 colocated tp1", "1P+1D tp1", "2 colocated tp1", "1P+2D tp1"]
    assert names(prefill=2, prefill_tp=2, decode_tp=[4, 8]) == ["2P tp2 + 1D tp4", "2P tp2 + 1D tp8"]
    assert names() == ["1P+1D tp1"]
